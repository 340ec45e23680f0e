"""What the tests of models share: bound models, weights, images."""

import numpy as np
import torch

from pflmpi import tree
from pflmpi.models.conv_net import CNN, ProtoCNN
from pflmpi.models.mlp import DNN, MLP
from pflmpi.rng import stream

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


def named(architecture):
    return f"{architecture.name}-{'x'.join(map(str, architecture.shape))}"


def start(architecture, seed=0):
    return architecture.init(stream(seed, 0, -1, "init"))


def images(architecture, count, seed=1):
    return torch.from_numpy(stream(seed, 0, -1, "x").standard_normal((count, *architecture.shape), dtype=np.float32))


def labels(architecture, count):
    return torch.arange(count) % architecture.num_classes


def scores(architecture, params, x, training=True):
    return architecture.logits(params["head"], architecture.features(params, x, training))


def count(params, *parts):
    return sum(leaf.numel() for part in parts for _, leaf in tree.leaves(params[part]))
