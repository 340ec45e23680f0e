"""Made-up messages and labels, for checks that try an algorithm before the first round."""

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.learning.task import Task
from pflmpi.messages.declared import client_template
from pflmpi.messages.kinds import Downlink, Own
from pflmpi.runtime.contract import calling, check_returned
from pflmpi.tree import Tree


def make_up_first_messages(algorithm: Algorithm, task: Task, client: int, rng: np.random.Generator) -> dict[str, Tree]:
    """Returns what a client receives in the first round; made up where it is unknown, or zero, which hides its use."""
    kinds = algorithm.downlink(task)
    received = {name: make_up_message(kind, task, rng) for name, kind in kinds.items()}
    if algorithm.introduces:
        return received
    with calling(algorithm, "publish", 0):
        published = algorithm.publish(task, algorithm.init_server(task), np.array([client]))
    check_returned(algorithm, "publish", published)
    for name, made_up in received.items():
        own = isinstance(kinds[name], Own)  # with a row per client
        sent, like = published.get(name, {}), tree.stack([made_up]) if own else made_up
        if not tree.differences(sent, like):
            value = tree.map(lambda leaf, instead: leaf if leaf.any() else instead, sent, like)
            received[name] = tree.row(value, 0) if own else value
    return received


def make_up_labels(task: Task, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Draws labels [*shape, ...] of a task: classes, or the numbers 0 and 1, which are valid labels of any task."""
    if task.kind.classes:
        return torch.from_numpy(rng.integers(0, task.num_classes, shape))
    values = rng.integers(0, 2, (*shape, *task.label_shape))
    return torch.from_numpy(task.kind.labels(values.reshape(-1, *task.label_shape)).reshape(values.shape))


def make_up_message(kind: Downlink, task: Task, rng: np.random.Generator) -> Tree:
    """Draws a message for one client: small numbers, ones for running variances, zeros for integers, True."""

    def draw(path: str, leaf: Tensor) -> Tensor:
        if not leaf.dtype.is_floating_point:
            return torch.full(leaf.shape, leaf.dtype == torch.bool, dtype=leaf.dtype)
        if path.endswith("running_var"):
            return torch.ones(leaf.shape)
        return torch.from_numpy(rng.normal(0, 0.1, tuple(leaf.shape))).to(leaf.dtype)

    template = client_template(kind, task.num_classes)
    return tree.unflatten({path: draw(path, leaf) for path, leaf in tree.leaves(template)})
