"""The relation module of pFedPM: a small network that scores how well features go with each class's."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pflmpi.models.initial import linear, uniform
from pflmpi.tree import Tree, leaf, part

CHANNELS, KERNEL, HIDDEN = 8, 3, 64


def init_relation(rng: np.random.Generator, num_features: int) -> Tree:
    """Initial weights by PyTorch's default law, for features of width d."""
    fan_in = 2 * KERNEL
    return {
        "conv": {"weight": uniform(rng, (CHANNELS, 2, KERNEL), fan_in), "bias": uniform(rng, (CHANNELS,), fan_in)},
        "fc1": linear(rng, CHANNELS * num_features, HIDDEN),
        "fc2": linear(rng, HIDDEN, 1),
    }


def relation_scores(weights: Tree, z: Tensor, class_features: Tensor) -> Tensor:
    """g([z_s; c_j]) in 0..1 for every pair, [B, K].

    A pair is a signal of length d with two channels: Conv1d(2 -> 8, kernel 3, padding 1), ReLU, fc 64, ReLU, fc 1,
    sigmoid.

    Args:
        weights: as `init_relation` returns them.
        z: [B, d].
        class_features: [K, d].
    """
    conv, fc1, fc2 = part(weights, "conv"), part(weights, "fc1"), part(weights, "fc2")
    samples, classes = len(z), len(class_features)
    both = z.unsqueeze(1).expand(-1, classes, -1), class_features.expand(samples, -1, -1)
    pairs = torch.stack(both, 2)  # [B, K, 2, d]
    found = F.conv1d(pairs.flatten(0, 1), leaf(conv, "weight"), leaf(conv, "bias"), padding=KERNEL // 2)
    hidden = F.relu(F.linear(F.relu(found).flatten(1), leaf(fc1, "weight"), leaf(fc1, "bias")))
    return F.linear(hidden, leaf(fc2, "weight"), leaf(fc2, "bias")).sigmoid().view(samples, classes)
