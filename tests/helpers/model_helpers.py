"""What the tests of models share: bound models, weights, images."""

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.models.base import Architecture
from pflmpi.models.conv_net import CNN, ProtoCNN
from pflmpi.models.mlp import DNN, MLP
from pflmpi.rng import stream
from pflmpi.tree import Tree

DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
SMALL_KERNEL = {"kernel": 3, "padding": 1}
WITHOUT_BATCH_NORM = [
    MLP().bind(DIGITS, 10),
    DNN(hidden=30).bind(CIFAR, 5),
    CNN(first_channels=4, second_channels=6, hidden=20).bind(CIFAR, 10),
    CNN(first_channels=4, second_channels=6, hidden=None).bind(CIFAR, 10),
    CNN(first_channels=4, second_channels=6, hidden=20, **SMALL_KERNEL).bind(DIGITS, 10),
    CNN(first_channels=4, second_channels=6, third_channels=5, hidden=20, **SMALL_KERNEL).bind((3, 16, 24), 10),
    ProtoCNN().bind(MNIST, 10),
]


def named(architecture: Architecture) -> str:
    return f"{architecture.name}-{'x'.join(map(str, architecture.shape))}"


def start(architecture: Architecture, seed: int = 0) -> Tree:
    return architecture.init(stream(seed, 0, -1, "init"))


def images(architecture: Architecture, count: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(stream(seed, 0, -1, "x").standard_normal((count, *architecture.shape), dtype=np.float32))


def labels(architecture: Architecture, count: int) -> Tensor:
    return torch.arange(count) % architecture.num_classes


def scores(architecture: Architecture, params: Tree, x: Tensor, training: bool = True) -> Tensor:
    return architecture.logits(params["head"], architecture.features(params, x, training))


def count(params: Tree, *parts: str) -> int:
    return sum(leaf.numel() for part in parts for _, leaf in tree.leaves(params[part]))
