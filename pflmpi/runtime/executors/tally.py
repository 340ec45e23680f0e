"""Scores of test samples, and counting what they get right: on the host, so that a device has one copy to do for it."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pflmpi.algorithms.base import Algorithm
from pflmpi.data.federation import Federation
from pflmpi.learning.client import Batch
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.runtime.contract import check_scores
from pflmpi.runtime.evaluation.measures import Counts
from pflmpi.tree import Tree


def predictions(
    algorithm: Algorithm, task: Task, state: Tree, received: Messages, batches: Iterable[Batch]
) -> list[Tensor]:
    """The scores [B, K] of the samples of some batches."""
    scores = []
    with torch.no_grad():
        for batch in batches:
            scores.append(algorithm.predict(task, state, received, batch.x))
            check_scores(algorithm, scores[-1], len(batch.x), task.num_classes)
    return scores


def counts(federation: Federation, clients: np.ndarray, scores: Tensor) -> Counts:
    """What scores of test samples get right, for each client.

    Args:
        clients: [m] ids.
        scores: [n, K] of the test samples of one client after another, in stored order, taken as logits, on the host.
    """
    tests, num_classes = [federation.test[client] for client in clients], federation.dataset.num_classes
    labels, sizes = federation.dataset.labels[np.concatenate(tests)], list(map(len, tests))
    whose = np.repeat(np.arange(len(clients)), sizes)
    chosen = scores.argmax(1).numpy()
    right = chosen == labels

    def by_class(whose: np.ndarray, classes: np.ndarray) -> np.ndarray:
        found = np.bincount(whose * num_classes + classes, minlength=len(clients) * num_classes)
        return found.reshape(len(clients), num_classes)

    likely = scores.double().log_softmax(1).numpy()[np.arange(len(labels)), labels]
    loss = np.array([-mine.sum() for mine in np.split(likely, np.cumsum(sizes)[:-1])], np.float64)
    return Counts(by_class(whose[right], labels[right]), by_class(whose, chosen), by_class(whose, labels), loss)
