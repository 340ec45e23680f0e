"""The report that every rank sends rank 0 at the end of a round: scores, seconds, memory."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pflmpi.machine import own_memory
from pflmpi.messages.groups import ClientGroup, clients_per_rank, rank_by_rank
from pflmpi.runtime.measures import Counts
from pflmpi.transports.base import Transport

_HEAD = 5  # microseconds of training and of testing, most memory, and what `Stop` says


@dataclass(frozen=True)
class RoundReport:
    """What rank 0 knows of a round from all ranks.

    Attributes:
        tested: [T] what the tested clients get right, in ascending order of their ids.
        unseen: [U] what those kept out of training get right; None if there are none.
        trained: [P] what the participants get right after local training; None if they were not tested then.
        train_loss: [P] float64, mean training loss of the participants.
        busiest: seconds that the slowest rank computed.
        waiting: seconds that the others waited for it, the mean of the ranks that compute.
        testing: seconds that those tested, their mean.
        memory: [R] the most bytes that each rank ever had; 0 where its system does not say.
        stop: [R, 2] what `Stop` says on each rank.
    """

    tested: Counts
    unseen: Counts | None
    trained: Counts | None
    train_loss: np.ndarray
    busiest: float
    waiting: float
    testing: float
    memory: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True)
class Measured:
    """What a rank reports.

    Attributes:
        tested: what the clients tested here get right, in ascending order of their ids, as `gather` numbers them.
        train_loss: mean training loss of each client trained here.
        training, testing: seconds of this rank.
        stop: what `Stop` says here.
    """

    tested: Counts
    train_loss: Mapping[int, float]
    training: float
    testing: float
    stop: tuple[float, float] = (0.0, 0.0)


def gather(
    transport: Transport,
    testing: list[list[ClientGroup]],
    training: list[list[ClientGroup]],
    totals: np.ndarray,
    num_clients: int,
    found: Measured,
) -> RoundReport | None:
    """Collect the reports of all ranks of a round on rank 0; None elsewhere.

    Args:
        testing: the groups tested by each rank.
        training: the groups trained by each rank.
        totals: [N + U, K] int64, test samples of every client by class.
        num_clients: N; those of higher ids are unseen, and from N + U on client N + U + i is client i after training.
        found: here.
    """
    tested = found.tested
    num_classes = totals.shape[1]
    rows = np.column_stack([tested.hits, tested.predicted, tested.loss])
    losses = [found.train_loss[client] for client in sorted(found.train_loss)]
    head = [int(found.training * 1e6), int(found.testing * 1e6), own_memory("VmHWM"), *found.stop]
    part = np.concatenate([head, rows.ravel(), losses]).astype(np.float64)
    lengths = _lengths(testing, training, num_classes)
    parts = transport.gather(part.view(np.uint8), _sizes(lengths))
    if parts is None:
        return None
    of_part = np.repeat(np.tile(np.arange(lengths.shape[1]), len(lengths)), lengths.ravel())
    values = np.concatenate(parts).view(np.float64)
    heads, scores, train_loss = (values[of_part == part] for part in range(lengths.shape[1]))
    heads, scores = heads.reshape(-1, _HEAD), scores.reshape(-1, 2 * num_classes + 1)
    (clients, order), (_, trained_order) = _ascending(testing), _ascending(training)
    hits, predicted, loss = np.split(scores[order], [num_classes, 2 * num_classes], axis=1)
    everyone = len(totals)
    counts = Counts(hits.astype(np.int64), predicted.astype(np.int64), totals[clients % everyone], loss[:, 0])
    seen, trained = clients < num_clients, clients >= everyone
    unseen = ~seen & ~trained
    trained_for, tested_for, memory = heads[:, :3].T
    busy = (trained_for + tested_for) / 1e6
    computes = lengths[:, 1:].any(1)
    return RoundReport(
        tested=counts.rows(seen),
        unseen=counts.rows(unseen) if unseen.any() else None,
        trained=counts.rows(trained) if trained.any() else None,
        train_loss=train_loss[trained_order],
        busiest=float(busy.max()),
        waiting=float(busy.max() - busy[computes].mean()) if computes.any() else 0.0,
        testing=float(tested_for[computes].mean()) / 1e6 if computes.any() else 0.0,
        memory=memory,
        stop=heads[:, 3:],
    )


def _lengths(testing: list[list[ClientGroup]], training: list[list[ClientGroup]], num_classes: int) -> np.ndarray:
    """[R, 3] numbers in the report of each rank: its head, the scores of its clients, and their losses."""
    tested, trained = clients_per_rank(testing), clients_per_rank(training)
    return np.column_stack([np.full_like(tested, _HEAD), (2 * num_classes + 1) * tested, trained])


def _sizes(lengths: np.ndarray) -> list[int]:
    """Bytes of the report of each rank."""
    sizes: list[int] = (8 * lengths.sum(1)).tolist()
    return sizes


def _ascending(groups: list[list[ClientGroup]]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all clients, ascending, and their places in the order of ranks."""
    clients = rank_by_rank(groups)
    order = np.argsort(clients, kind="stable")
    return clients[order], order
