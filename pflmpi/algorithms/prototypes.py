"""Class means on the server: combining the clients' means, and training a head on them."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pflmpi.learning.client import Batch
from pflmpi.learning.diagnostics import ClassVectors
from pflmpi.learning.task import Task
from pflmpi.tree import Tree, leaf

Weighting = Literal["samples", "clients", "as_printed"]

GLOBAL_MEANS = ClassVectors(  # of a server whose state is what `initial_class_means` and `combine_class_means` return
    title="Class means",
    caption="The class means that the server combines.",
    server="means",
    server_known="known",
)


def initial_class_means(task: Task) -> Tree:
    """The initial class means: `{"means": [K, d] zeros, "known": [K] all false}`."""
    return {
        "means": torch.zeros(task.num_classes, task.num_features),
        "known": torch.zeros(task.num_classes, dtype=torch.bool),
    }


def combine_class_means(up: Tree, previous: Tree, weighting: Weighting) -> Tree:
    """The new global class means, in the form of `initial_class_means`.

    With m_j the uploads of class j and N_j their total samples:

        samples      C_j = sum_i (n_ij / N_j) c_ij
        clients      C_j = sum_i c_ij / |m_j|
        as_printed   C_j = 1 / |m_j| sum_i (n_ij / N_j) c_ij, the factor as in FedProto eq. 6 and FedFCD eq. 5,
                     although the weights already sum to one

    A class without uploads keeps its previous mean.

    Args:
        up: `{"labels": [M], "counts": [M], "means": [M, d], ...}`.
        previous: the previous means; entries other than "means" and "known" are ignored.
    """
    labels, counts, means = (leaf(up, name) for name in ("labels", "counts", "means"))
    previous_means, known = leaf(previous, "means"), leaf(previous, "known")
    member = (torch.arange(len(known)).unsqueeze(-1) == labels).to(torch.float64)  # [K, M]
    num_uploads = member.sum(1)
    weights = member if weighting == "clients" else member * counts.double()
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    if weighting == "as_printed":
        weights = weights / num_uploads.clamp(min=1).unsqueeze(-1)
    uploaded = num_uploads > 0
    combined = torch.where(uploaded.unsqueeze(-1), (weights @ means.double()).float(), previous_means)
    return {"means": combined, "known": known | uploaded}


def batch_means(z: Tensor, batch: Batch, num_classes: int) -> tuple[Tensor, Tensor]:
    """Each class's share of a batch, b_j / b [K], and its mean feature [K, d]; 0 for absent classes.

    Args:
        z: [B, d] features of the batch.
    """
    target = None if batch.padding is None else batch.padding.target
    member = one_hot(batch, num_classes) / len(z) if target is None else -target  # [B, K]
    share = member.sum(0)
    return share, member.mT @ z / torch.where(share > 0, share, 1).unsqueeze(-1)


def one_hot(batch: Batch, num_classes: int) -> Tensor:
    """[B, K] float32."""
    return (batch.y.unsqueeze(-1) == torch.arange(num_classes, device=batch.y.device)).float()


def train_head(head: Tree, up: Tree, rng: np.random.Generator, *, lr: float, epochs: int, batch_size: int) -> Tree:
    """The head after plain SGD with cross-entropy on uploaded pairs of class mean and label; computed in float64.

    The gradient of the mean over a minibatch of pairs (c, y) is, with p = softmax(W c + b), mean((p - e_y) c^T) for W
    and mean(p - e_y) for b.

    Args:
        head: `{"weight": [K, d], "bias": [K]}`.
        up: `{"labels": [M], "means": [M, d], ...}`, the server's form of `ClassMeans`.
        rng: shuffles the pairs in every epoch.
        epochs: passes over the pairs.
        batch_size: pairs per step; the last step of an epoch may have fewer.
    """
    weight, bias = leaf(head, "weight").double(), leaf(head, "bias").double()
    means, labels = leaf(up, "means").double(), leaf(up, "labels").long()
    target = F.one_hot(labels, len(bias))
    for _ in range(epochs):
        for batch in torch.split(torch.from_numpy(rng.permutation(len(labels))), batch_size):
            error = ((means[batch] @ weight.mT + bias).softmax(-1) - target[batch]) / len(batch)
            weight, bias = weight - lr * (error.mT @ means[batch]), bias - lr * error.sum(0)
    return {"weight": weight.float(), "bias": bias.float()}
