"""Hooks around the training loop: reports of all ranks to rank 0, metrics of a round, timeouts, stopping."""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pflmpi.machine import own_memory
from pflmpi.messages.groups import ClientGroup, clients_per_rank, rank_by_rank
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.counts import Counts
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
    """Reports of all ranks on a round, on rank 0.

    Attributes:
        tested: [T] scores of the tested clients, in ascending order of their ids.
        unseen: [U] scores of those kept out of training; None if there are none.
        trained: [P] scores of the participants after local training; None if they were not tested then.
        validated: [T] as `tested`, on validation samples; None if there are none.
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
    validated: Counts | None
    train_loss: np.ndarray
    busiest: float
    waiting: float
    testing: float
    memory: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True)
class Measured:
    """Report of a rank on a round.

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
    validation_totals: np.ndarray | None = None,
) -> RoundReport | None:
    """Collect the reports of all ranks of a round on rank 0; None elsewhere.

    Args:
        testing: the groups tested by each rank.
        training: the groups trained by each rank.
        totals: [N + U, K] int64, test samples of every client by class.
        num_clients: N; those of higher ids are unseen, and from N + U on client N + U + i is client i after training,
            and from 2 (N + U) on client 2 (N + U) + i is client i with its validation samples.
        validation_totals: [N, K] int64, validation samples of the trained clients by class; None if there are none.
    """
    lengths = _lengths(testing, training, 2 * measured.tested.hits.shape[1] + 1 + len(measured.tested.values))
    reports = transport.gather(_packed(measured).view(np.uint8), (8 * lengths.sum(1)).tolist())
    if reports is None:
        return None
    parts = range(lengths.shape[1])
    part_of = np.repeat(np.tile(parts, len(lengths)), lengths.ravel())
    values = np.concatenate(reports).view(np.float64)
    heads, scores, train_loss = (values[part_of == part] for part in parts)
    heads = heads.reshape(-1, _HEAD)
    trained_for, tested_for, memory = heads[:, :3].T
    busy, computes = (trained_for + tested_for) / 1e6, lengths[:, 1:].any(1)
    like = measured.tested
    tested, unseen, trained, validated = _scores(scores, testing, totals, num_clients, like, validation_totals)
    return RoundReport(
        tested=tested,
        unseen=unseen if len(unseen.loss) else None,
        trained=trained if len(trained.loss) else None,
        validated=None if validation_totals is None else validated,
        train_loss=train_loss[np.argsort(rank_by_rank(training), kind="stable")],
        busiest=float(busy.max()),
        waiting=float(busy.max() - busy[computes].mean()) if computes.any() else 0.0,
        testing=float(tested_for[computes].mean()) / 1e6 if computes.any() else 0.0,
        memory=memory,
        stop=heads[:, 3:],
    )


def _packed(measured: Measured) -> np.ndarray:
    """The report of this rank, float64: its head, the scores of its clients, and their losses."""
    head = [int(measured.training * 1e6), int(measured.testing * 1e6), own_memory("VmHWM"), *measured.stop]
    tested = measured.tested
    scores = np.column_stack([tested.hits, tested.predicted, tested.loss, *tested.values.values()])
    losses = [measured.train_loss[client] for client in sorted(measured.train_loss)]
    return np.concatenate([head, scores.ravel(), losses]).astype(np.float64)


def _lengths(testing: list[list[ClientGroup]], training: list[list[ClientGroup]], width: int) -> np.ndarray:
    """[R, 3] numbers in the three parts of the report of each rank, so many for a tested client; see `_packed`."""
    tested, trained = clients_per_rank(testing), clients_per_rank(training)
    return np.column_stack([np.full_like(tested, _HEAD), width * tested, trained])


def _scores(
    scores: np.ndarray,
    testing: list[list[ClientGroup]],
    totals: np.ndarray,
    num_clients: int,
    like: Counts,
    validation_totals: np.ndarray | None,
) -> tuple[Counts, Counts, Counts, Counts]:
    """The scores of the tested clients, of the unseen ones, of the participants after training, and on validation.

    Args:
        like: counts of any clients of the run.
    """
    clients, everyone, num_classes = rank_by_rank(testing), len(totals), like.hits.shape[1]
    order = np.argsort(clients, kind="stable")
    clients, rows = clients[order], scores.reshape(-1, 2 * num_classes + 1 + len(like.values))[order]
    hits, predicted, others = np.split(rows, [num_classes, 2 * num_classes], axis=1)
    loss, *values = others.T
    total = totals[clients % everyone]
    starts = np.searchsorted(clients, [num_clients, everyone, 2 * everyone])
    if validation_totals is not None:
        total[starts[2] :] = validation_totals[clients[starts[2] :] - 2 * everyone]
    by_measure = dict(zip(like.values, values, strict=True))
    counts = Counts(hits.astype(np.int64), predicted.astype(np.int64), total, loss, by_measure)
    tested, unseen, trained, validated = (counts.rows(slice(*ends)) for ends in pairwise([0, *starts, len(clients)]))
    return tested, unseen, trained, validated


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
        return time.perf_counter() - self._began


class RoundHooks:
    """Hooks of the training loop: reports, metrics and progress of a round, and whether all ranks go on.

    Attributes:
        stop: whether this rank has a reason to stop.

    Args:
        checkpoints: get the metrics of each round.
        observe: called on rank 0 after every round.
        timeout: seconds that a call waits for the other ranks; None follows the length of the rounds.
    """

    def __init__(
        self,
        setup: Setup,
        transport: Transport,
        checkpoints: Checkpoints,
        observe: Observer,
        stop: Stop,
        timeout: float | None = None,
    ) -> None:
        self._transport, self._checkpoints = transport, checkpoints
        self._observe, self.stop, self._timeout = observe, stop, timeout
        everyone = range(setup.task.num_clients)
        self._scores = setup.executor.untested(everyone)  # the newest of each client
        self._validation = None if setup.validation is None else setup.validation.untested(everyone)
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
        self.stop.round_took(watch.seconds)
        measured = Measured(counts, losses, watch.laps["training"], watch.laps["testing"], self.stop.report)
        num_clients = len(self._scores.loss)
        validation_totals = None if self._validation is None else self._validation.total
        reported = gather(
            self._transport,
            now.reporting,
            now.training,
            now.test_class_counts,
            num_clients,
            measured,
            validation_totals,
        )
        progress = None if reported is None else self._progress(now, reported, watch.laps["exchange"])
        pause = self.stop.agree(self._transport, watch.seconds, None if reported is None else reported.stop)
        self._limit_waiting(max(LEAST_TIMEOUT, _PATIENCE * self.stop.longest))
        return progress, pause

    def _progress(self, now: RoundSchedule, reported: RoundReport, exchanging: float) -> Progress:
        """Progress of rank 0 after a round, once it is in metrics.csv and shown."""
        if now.evaluates:
            self._scores = self._scores.updated(now.tested, reported.tested)
            if self._validation is not None and reported.validated is not None:
                self._validation = self._validation.updated(now.tested, reported.validated)
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
                **({} if (simulated := now.simulated_seconds) is None else {"simulated": simulated}),
            },
            bytes={"up": now.up_bytes, "down": now.down_bytes, "wire_up": wire_up, "wire_down": wire_down},
            memory=reported.memory,
            unseen=reported.unseen,
            validation=self._validation,
            trained=reported.trained,
            train_loss=reported.train_loss,
            measures=[*self._scores.values],
        )
        self._checkpoints.record(progress)
        self._observe(progress)
        self.stop.early.add(progress.columns)
        return progress

    def _limit_waiting(self, seconds: float) -> None:
        """Set how long a call waits for other ranks, where that is not configured."""
        if self._timeout is None:
            self._transport.timeout = seconds
