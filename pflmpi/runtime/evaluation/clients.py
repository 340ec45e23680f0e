"""Testing the personal models of all clients, where they live."""

from dataclasses import dataclass

import numpy as np

from pflmpi.messages.downlink import Reply
from pflmpi.messages.groups import ClientGroup
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.evaluation.measures import Counts, in_client_order
from pflmpi.runtime.executors.base import Executor


@dataclass(frozen=True)
class Scores:
    """What each client's personal model gets right on its test split.

    Attributes:
        correct: [N] int64.
        total: [N] int64; clients without test samples count in no average.
    """

    correct: np.ndarray
    total: np.ndarray

    @property
    def accuracy(self) -> np.ndarray:
        """[N] float64, in 0..1; NaN for a client without test samples."""
        return np.where(self.total > 0, self.correct / np.maximum(self.total, 1), np.nan)

    @property
    def mean(self) -> float:
        """Plain mean of the accuracy over clients."""
        return float(np.nanmean(self.accuracy)) if self.total.any() else float("nan")

    @property
    def weighted(self) -> float:
        """All correct over all samples."""
        return float(self.correct.sum() / self.total.sum()) if self.total.any() else float("nan")

    @property
    def spread(self) -> float:
        """Standard deviation of the accuracy over clients."""
        return float(np.nanstd(self.accuracy)) if self.total.any() else float("nan")


def evaluate(executor: Executor, population: Population, reply: Reply, groups: list[ClientGroup], round: int) -> Counts:
    """What the clients of the given groups get right, in the order of `clients_of(groups)`."""
    found = []
    for group in groups:
        # Only what prediction reads: a client that was absent has not received anything else.
        received = population.received(group, reply, executor.algorithm.predicts_with)
        found.append(executor.evaluate(group, population.get(group), received, round))
    return in_client_order(groups, found, executor.federation.dataset.num_classes)
