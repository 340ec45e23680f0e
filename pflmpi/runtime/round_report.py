"""What surrounds the training loop: the report of each rank to rank 0, the metrics of a round, waiting and stopping."""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pflmpi.machine import own_memory
from pflmpi.messages.groups import ClientGroup, clients_per_rank, rank_by_rank
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.measures import Counts
from pflmpi.runtime.progress import Observer, Progress
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.stopping import Pause, Stop
from pflmpi.transports.base import Transport

_FIRST_ROUND = 3600.0  # seconds to wait for other ranks while no round has been measured
_PATIENCE = 20.0  # times the longest round, afterwards
_HEAD = 5  # microseconds of training and of testing, most memory, and what `Stop` says


@dataclass(frozen=True)
class RoundReport:
    """What rank 0 knows of a round from all ranks.

    Attributes:
        tested: [T] scores of the tested clients, in ascending order of their ids.
        unseen: [U] scores of those kept out of training; None if there are none.
        trained: [P] scores of the participants after local training; None if they were not tested then.
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
        tested: scores of the clients tested here, in ascending order of their ids, as `gather` numbers them.
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
    measured: Measured,
) -> RoundReport | None:
    """Collect the reports of all ranks of a round on rank 0; None elsewhere.

    Args:
        testing: the groups tested by each rank.
        training: the groups trained by each rank.
        totals: [N + U, K] int64, test samples of every client by class.
        num_clients: N; those of higher ids are unseen, and from N + U on client N + U + i is client i after training.
        measured: here.
    """
    tested = measured.tested
    num_classes = totals.shape[1]
    rows = np.column_stack([tested.hits, tested.predicted, tested.loss])
    losses = [measured.train_loss[client] for client in sorted(measured.train_loss)]
    head = [int(measured.training * 1e6), int(measured.testing * 1e6), own_memory("VmHWM"), *measured.stop]
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


class Stopwatch:
    """Seconds of the parts of a round, from the moment it is made.

    Attributes:
        laps: seconds of each part; a part may be measured in several pieces.
    """

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.laps: defaultdict[str, float] = defaultdict(float)

    def lap(self, part: str) -> None:
        """Add the seconds since the last lap to a part."""
        before, self._last = self._last, time.perf_counter()
        self.laps[part] += self._last - before

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._began


class RoundHooks:
    """What happens around a round: seconds, the report of all ranks, metrics, progress, and whether all go on.

    Args:
        setup: of the run.
        transport: to the other ranks; how long its calls wait follows from the length of the rounds.
        checkpoints: get the metrics of each round.
        observe: called on rank 0 after every round.
        stop: whether this rank has a reason to stop.
    """

    def __init__(
        self, setup: Setup, transport: Transport, checkpoints: Checkpoints, observe: Observer, stop: Stop
    ) -> None:
        self._setup, self._transport, self._checkpoints = setup, transport, checkpoints
        self._observe, self._stop = observe, stop
        self._scores = Counts.none(setup.executor.federation.test_class_counts)  # the newest of each client
        self._last_report = time.perf_counter()
        self._limit_waiting(_FIRST_ROUND)

    def end_round(
        self, now: RoundSchedule, counts: Counts, losses: Mapping[int, float], watch: Stopwatch
    ) -> tuple[Progress | None, Pause | None]:
        """Report a round to rank 0, which writes and shows its metrics, and agree on whether to stop.

        Args:
            counts, losses: of the clients that were tested and trained here; see `Measured`.
            watch: with the laps training, testing and exchange.

        Returns:
            What rank 0 knows of the round, None elsewhere; why all ranks stop after it, None if they go on.
        """
        self._stop.round_took(watch.seconds)
        measured = Measured(counts, losses, watch.laps["training"], watch.laps["testing"], self._stop.said)
        reported = gather(self._transport, *now.reported, self._setup.task.num_clients, measured)
        progress = None if reported is None else self._progress(now, reported, watch.laps["exchange"])
        pause = self._stop.agree(self._transport, watch.seconds, None if reported is None else reported.stop)
        self._limit_waiting(max(LEAST_TIMEOUT, _PATIENCE * self._stop.longest))
        return progress, pause

    def _progress(self, now: RoundSchedule, reported: RoundReport, exchanging: float) -> Progress:
        """What rank 0 knows after a round, once it is in metrics.csv and shown."""
        if now.evaluates:
            self._scores = self._scores.updated(now.tested, reported.tested)
        before, self._last_report = self._last_report, time.perf_counter()
        wire_down, wire_up = map(np.array, self._transport.counter.take("data"))  # since the last round
        progress = Progress(
            round=now.round,
            participants=now.participants,
            skipped=now.skipped,
            scores=self._scores if now.evaluates else None,
            seconds={
                "compute": reported.busiest,
                "exchange": exchanging,
                "waiting": reported.waiting,
                "evaluation": reported.testing,
                "checkpoint": self._checkpoints.take_seconds(),
                "round": self._last_report - before,
            },
            bytes={"up": now.up_bytes, "down": now.down_bytes, "wire_up": wire_up, "wire_down": wire_down},
            memory=reported.memory,
            unseen=reported.unseen,
            trained=reported.trained,
            train_loss=reported.train_loss,
        )
        self._checkpoints.record(progress)
        self._observe(progress)
        self._stop.early.add(progress.columns)
        return progress

    def _limit_waiting(self, seconds: float) -> None:
        """Set how long a call waits for other ranks, where that is not configured."""
        if self._setup.timeout is None:
            self._transport.timeout = seconds
