"""A tiny problem for tests of single steps: 2 x 2 pictures, 3 features, 3 classes, in float arithmetic by hand."""

import numpy as np
import torch

from pflmpi.learning.client import Batch, ClientData, Padding
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.models import MODELS

SHAPE, FEATURES, CLASSES = (1, 2, 2), 5, 3


def task(clients=4, **training):
    architecture = MODELS["mlp"](hidden=FEATURES).bind(SHAPE, CLASSES)
    return Task(architecture, TrainingConfig(**training), clients, 0, (0.5,), (0.5,))


def batch(seed, size=6):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(size, *SHAPE)).astype(np.float32))
    return Batch(x, torch.from_numpy(rng.integers(0, CLASSES, size)))


def padded(x, y, weight):
    """A batch in which only samples of weight 1 are real."""
    share = weight / weight.sum().clamp(min=1)
    target = (y.unsqueeze(-1) == torch.arange(CLASSES)) * -share.unsqueeze(-1)
    return Batch(x, y, Padding(weight, share, target, (weight.sum() > 0).float()))


def data(batches, lr=0.1):
    labels = torch.cat([minibatch.y for minibatch in batches])
    counts = torch.bincount(labels, minlength=CLASSES).float()
    return ClientData({"train": batches}, batches, counts, lr, 1)


def body_leaves(model):
    """The body's weight and bias, whatever the model calls them."""
    leaves = []

    def walk(node):
        for key in sorted(node):
            value = node[key]
            walk(value) if isinstance(value, dict) else leaves.append(value)

    walk(model["body"])
    return sorted(leaves, key=lambda leaf: -leaf.ndim)


def to_numpy(model):
    weight, bias = body_leaves(model)
    head = model["head"]
    return {
        "W1": weight.double().numpy().copy(),
        "b1": bias.double().numpy().copy(),
        "W2": head["weight"].double().numpy().copy(),
        "b2": head["bias"].double().numpy().copy(),
    }


def flat(minibatch):
    return minibatch.x.flatten(1).double().numpy(), minibatch.y.numpy()


def assert_close(model, expected, tolerance=1e-6):
    """float32 against float64: a few units in the last place of values near one."""
    for name, value in to_numpy(model).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=tolerance, err_msg=name)
