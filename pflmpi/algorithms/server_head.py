"""A head that the server trains on the class means of the clients."""

import numpy as np
import torch
from torch.nn import functional as F

from pflmpi.tree import Tree, leaf


def train_head(head: Tree, up: Tree, rng: np.random.Generator, *, lr: float, epochs: int, batch_size: int) -> Tree:
    """A head after SGD with cross-entropy on uploaded pairs of class mean and label; the argument stays as is.

    The gradient of the mean over a minibatch of pairs (c, y) is, with p = softmax(W c + b), mean((p - e_y) c^T) by W
    and mean(p - e_y) by b. Neither momentum nor weight decay. In float64 inside.

    Args:
        head: `{"weight": [K, d], "bias": [K]}`.
        up: `{"labels": [M], "means": [M, d], ...}`, as the server gets `ClassMeans`.
        rng: shuffles the pairs anew in every epoch.
        lr: learning rate.
        epochs: how often every pair is used.
        batch_size: pairs per step; the last step of an epoch may have fewer.
    """
    weight, bias = leaf(head, "weight").double(), leaf(head, "bias").double()
    means, labels = leaf(up, "means").double(), leaf(up, "labels").long()
    target = F.one_hot(labels, len(bias))
    for _ in range(epochs):
        for chosen in torch.split(torch.from_numpy(rng.permutation(len(labels))), batch_size):
            error = ((means[chosen] @ weight.mT + bias).softmax(-1) - target[chosen]) / len(chosen)
            weight, bias = weight - lr * (error.mT @ means[chosen]), bias - lr * error.sum(0)
    return {"weight": weight.float(), "bias": bias.float()}
