"""Models of others as candidates: whose to send, what they are worth, and how they are mixed in (FedFomo)."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import only
from pflmpi.learning.client import Batch, cross_entropy, squared_distance
from pflmpi.learning.task import Task
from pflmpi.tree import Tree

NOBODY = -1  # instead of an id


def unstack(rows: Tree, count: int) -> list[Tree]:
    """`count` trees from one with a leading axis of that length."""

    def at(index: int) -> Tree:
        return tree.map(lambda leaf: leaf[index], rows)

    return [at(index) for index in range(count)]


def mean_losses(task: Task, models: list[Tree], batches: Iterable[Batch]) -> Tensor:
    """The mean cross-entropy of each model over all samples of the batches, [models]."""
    total = samples = torch.zeros((), device=task.device)
    with torch.no_grad():
        for batch in batches:
            size = torch.ones_like(batch.y) if batch.padding is None else batch.padding.weight
            losses = [cross_entropy(task.predict(model, batch.x), batch) for model in models]
            total, samples = total + size.sum() * torch.stack(losses), samples + size.sum()
    return total / samples


def weigh(losses: Tensor, before: Tree, candidates: list[Tree]) -> Tensor:
    """The raw weights w_n of the candidates, [candidates].

    Args:
        losses: [1 + candidates], first that of the model that they are compared with.
        before: the model that they are compared with.
        candidates: models alike.
    """
    parts = only(before, ("body", "head"))
    distances = torch.stack([squared_distance(one, parts) for one in candidates]).sqrt()
    return (losses[0] - losses[1:]) / (distances + 1e-5)


def shares_of(weights: Tensor) -> Tensor:
    """max(w_n, 0) / sum_m max(w_m, 0), [candidates]; all of it for the first where no weight is positive."""
    positive = weights.clamp(min=0)
    first = torch.arange(len(weights), device=weights.device) == 0
    positive = torch.where(positive.sum() > 0, positive, first.to(positive.dtype))
    return positive / positive.sum()


def mix(candidates: list[Tree], shares: Tensor) -> Tree:
    """The sum of the candidates, each times its share; shares: [candidates]."""

    def combined(*leaves: Tensor) -> Tensor:
        total: Tensor = torch.tensordot(shares, torch.stack(leaves), dims=([0], [0]))
        return total

    return tree.map(combined, candidates[0], *candidates[1:])


def choose(
    affinity: np.ndarray, trained: np.ndarray, count: int, epsilon: float, rng: np.random.Generator
) -> np.ndarray:
    """Whose models every client is sent, [N, count] int64, `NOBODY` where there are no more.

    Args:
        affinity: [N, N], of a client (row) to the model of another.
        trained: [N] bool, whose models may be sent; nobody is sent their own.
        count: M.
        epsilon: the probability, for each of the count, that any model left is chosen and not the best.
        rng: the generator.
    """
    n = len(trained)
    ties, lot = rng.random((2, n, n))
    explores = rng.random((count, n)) < epsilon
    rank = np.lexsort((ties, affinity)).argsort(1)  # [N, N], highest for the best
    left = trained & ~np.eye(n, dtype=bool)
    chosen = np.full((n, count), NOBODY, np.int64)
    for m in range(count):
        preference = np.where(left, np.where(explores[m][:, np.newaxis], lot, rank), -1)
        best = preference.argmax(1)
        chosen[:, m] = np.where(left.any(1), best, NOBODY)
        left[np.arange(n), best] = False
    return chosen
