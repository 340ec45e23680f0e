"""Models of others as candidates: whose to send, what they are worth, and how they are mixed in (FedFomo)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import only
from pflmpi.learning.client import Batch, squared_distance, task_loss
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import NOBODY
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Draws:
    """Random numbers, uniform in [0, 1), for choosing models.

    Attributes:
        ties: [m, N] decide between equal affinities.
        lot: [m, N] decide where a client explores.
        explores: [count, m] decide whether it does.
    """

    ties: np.ndarray
    lot: np.ndarray
    explores: np.ndarray


def unstack(rows: Tree, count: int) -> list[Tree]:
    """`count` trees from one with a leading axis of that length."""

    def at(index: int) -> Tree:
        return tree.map(lambda leaf: leaf[index], rows)

    return [at(index) for index in range(count)]


def mean_losses(task: Task, models: list[Tree], batches: Iterable[Batch]) -> Tensor:
    """The mean loss of each model over all samples of the batches, [models]."""
    total = samples = torch.zeros((), device=task.device)
    with torch.no_grad():
        for batch in batches:
            ones, padding = batch.y.new_ones, batch.padding
            size = ones(len(batch.x), dtype=torch.int64) if padding is None else padding.weight
            losses = [task_loss(task, task.predict(model, batch.x), batch) for model in models]
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
    distances = torch.stack([squared_distance(candidate, parts) for candidate in candidates]).sqrt()
    return (losses[0] - losses[1:]) / (distances + 1e-5)


def shares_of(weights: Tensor) -> Tensor:
    """max(w_n, 0) / sum_m max(w_m, 0), [candidates]; all of it for the first where no weight is positive."""
    positive = weights.clamp(min=0)
    first = torch.arange(len(weights), device=weights.device) == 0
    positive = torch.where(positive.sum() > 0, positive, first.to(positive.dtype))
    return positive / positive.sum()


def mix(candidates: list[Tree], shares: Tensor) -> Tree:
    """The sum of the candidates, each times its share; what is not floating is the first's. shares: [candidates]."""

    def combined(*leaves: Tensor) -> Tensor:
        total: Tensor = torch.tensordot(shares, torch.stack(leaves), dims=([0], [0]))
        return total

    return tree.mix(combined, candidates[0], *candidates[1:])


def draw(stream_after: Callable[[int], np.random.Generator], clients: np.ndarray, n: int, count: int) -> Draws:
    """The random numbers of some clients [m]: what they are does not depend on who else is among them.

    Args:
        stream_after: from how many numbers to pass over, the generator of the round.
        clients: ids.
        n: all clients.
        count: M.
    """
    ties, lot = (
        np.array([stream_after((table * n + client) * n).random(n) for client in clients.tolist()]).reshape(-1, n)
        for table in (0, 1)
    )
    return Draws(ties, lot, stream_after(2 * n * n).random((count, n))[:, clients])


def choose(affinity: np.ndarray, left: np.ndarray, count: int, epsilon: float, draws: Draws) -> np.ndarray:
    """Whose models some clients are sent, [m, count] int64, `NOBODY` where there are no more.

    Args:
        affinity: [m, N], of a client (row) to the model of another.
        left: [m, N] bool, whose models each may be sent.
        count: M.
        epsilon: the probability, for each of the count, that any model left is chosen and not the best.
        draws: random numbers of these clients.
    """
    left, rows = left.copy(), np.arange(len(left))
    chosen = np.full((len(left), count), NOBODY, np.int64)
    for m in range(count):
        explores = (draws.explores[m] < epsilon)[:, np.newaxis]
        known = np.where(left, affinity, -np.inf)
        eligible = left & (explores | (known == known.max(1, keepdims=True)))
        best = np.where(eligible, np.where(explores, draws.lot, draws.ties), -1).argmax(1)
        chosen[:, m] = np.where(left.any(1), best, NOBODY)
        left[rows, best] = False
    return chosen
