"""Hooks around the training loop: reports of all ranks to rank 0, metrics of a round, timeouts, stopping."""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pflmpi.machine import own_memory
from pflmpi.messages.groups import clients_by_rank, clients_per_rank
from pflmpi.runtime.checkpoints import Checkpoints
from pflmpi.runtime.config import LEAST_TIMEOUT
from pflmpi.runtime.counts import Counts
from pflmpi.runtime.progress import Observer, Progress
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.stopping import Pause, Stop
from pflmpi.text import format_ranges
from pflmpi.transports.base import Transport

_log = logging.getLogger(__name__)
_FIRST_ROUND = 3600.0  # seconds to wait for other ranks while no round has been measured
_PATIENCE = 20.0  # times the longest round, afterwards


@dataclass(frozen=True)
class RoundReport:
    """A round as reported by all ranks, on rank 0; clients are in ascending order of ids."""

    tested: Counts  # [T] results of the tested clients
    unseen: Counts | None  # [U] results of the clients kept out of training; None if there are none
    trained: Counts | None  # [P] results of the participants after local training; None if they were not tested then
    validated: Counts | None  # [T] as `tested`, on validation samples; None if there are none
    train_loss: np.ndarray  # [P] float64, mean training loss of the participants
    seconds: dict[str, float]  # `compute`, `waiting` and `evaluation`; see `Progress`
    memory: np.ndarray  # [R] peak memory of each rank in bytes; 0 where the system does not say
    stop: np.ndarray  # [R, 2] `Stop.report` of each rank


def gather_report(
    transport: Transport,
    now: RoundSchedule,
    tested: Counts,
    train_loss: Mapping[int, float],
    seconds: tuple[float, float],
    stop: tuple[float, float],
) -> RoundReport | None:
    """Gathers the reports of all ranks on rank 0; returns None elsewhere.

    Args:
        tested: results of the clients tested here, in ascending order of their numbers in `now.reporting`.
        train_loss: mean training loss of each client trained here.
        seconds: for which this rank trained and tested.
        stop: `Stop.report` of this rank.
    """
    head = [*seconds, own_memory("VmHWM"), *stop]
    rows = np.column_stack([tested.hits, tested.predicted, tested.loss, *tested.values.values()])
    losses = [train_loss[client] for client in sorted(train_loss)]
    report = np.concatenate([head, rows.ravel(), losses]).astype(np.float64)
    num_tested, num_trained = clients_per_rank(now.reporting), clients_per_rank(now.training)
    lengths = np.column_stack([np.full_like(num_tested, len(head)), rows.shape[1] * num_tested, num_trained])
    reports = transport.gather(report.view(np.uint8), (8 * lengths.sum(1)).tolist())
    if reports is None:
        return None
    part_of = np.repeat(np.tile(range(3), len(lengths)), lengths.ravel())
    values = np.concatenate(reports).view(np.float64)
    heads, scores, losses = (values[part_of == part] for part in range(3))
    heads = heads.reshape(-1, len(head))
    return RoundReport(
        *_split_scores(scores.reshape(-1, rows.shape[1]), now, tested),
        train_loss=losses[np.argsort(clients_by_rank(now.training), kind="stable")],
        seconds=_summarise_seconds(heads[:, 0], heads[:, 1], num_tested + num_trained > 0),
        memory=heads[:, 2],
        stop=heads[:, 3:],
    )


def _summarise_seconds(training: np.ndarray, testing: np.ndarray, computes: np.ndarray) -> dict[str, float]:
    """Summarises the seconds [R] of all ranks over those that had clients to compute (`computes` [R])."""
    if not computes.any():
        computes = np.ones_like(computes)
    busy = training + testing
    return {
        "compute": float(busy.max()),
        "waiting": float(busy.max() - busy[computes].mean()),
        "evaluation": float(testing[computes].mean()),
    }


def _split_scores(
    rows: np.ndarray, now: RoundSchedule, like: Counts
) -> tuple[Counts, Counts | None, Counts | None, Counts | None]:
    """Returns `tested`, `unseen`, `trained` and `validated` of a report.

    Args:
        rows: reported rows, rank by rank.
        like: counts of any clients of the run.
    """
    numbers, num_classes = clients_by_rank(now.reporting), like.hits.shape[1]
    num_clients, validation = len(now.test_class_counts), now.setup.validation  # with unseen clients
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    hits, predicted, loss_and_values = np.split(rows[order], [num_classes, 2 * num_classes], axis=1)
    loss, *values = loss_and_values.T
    total = now.test_class_counts[numbers % num_clients]
    starts = np.searchsorted(numbers, [now.setup.task.num_clients, num_clients, 2 * num_clients])
    if validation is not None:
        total[starts[2] :] = validation.federation.test_class_counts[numbers[starts[2] :] - 2 * num_clients]
    by_measure = dict(zip(like.values, values, strict=True))
    counts = Counts(hits.astype(np.int64), predicted.astype(np.int64), total, loss, by_measure)
    tested, unseen, trained, validated = (counts.rows(slice(*ends)) for ends in pairwise([0, *starts, len(numbers)]))
    return (
        tested,
        unseen if len(unseen.loss) else None,
        trained if len(trained.loss) else None,
        validated if validation is not None else None,
    )


class Stopwatch:
    """Measures the parts of a round; starts when it is created.

    Attributes:
        laps: seconds of each part, summed over its laps.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: defaultdict[str, float] = defaultdict(float)

    def lap(self, part: str) -> None:
        """Add the seconds since the last lap to a part."""
        before, self._last = self._last, time.perf_counter()
        self.laps[part] += self._last - before

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start


class RoundHooks:
    """Hooks of the training loop: reports and metrics of each round, and whether all ranks go on.

    Attributes:
        stop: whether this rank has a reason to stop.

    Args:
        checkpoints: records the metrics of each round.
        observe: called on rank 0 after every round.
        timeout: seconds that a call waits for the other ranks; None adapts it to the length of rounds.
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
        clients = range(setup.task.num_clients)
        self._scores = setup.executor.untested(clients)  # the newest of each client
        self._validation = None if setup.validation is None else setup.validation.untested(clients)
        self._warned = False
        self._last_report = time.perf_counter()
        self._limit_waiting(_FIRST_ROUND)

    def end_round(
        self, now: RoundSchedule, counts: Counts, losses: Mapping[int, float], watch: Stopwatch
    ) -> tuple[Progress | None, Pause | None]:
        """Report a round to rank 0, which records and shows its metrics, and agree on whether to stop.

        Args:
            counts, losses: of the clients that were tested and trained here; see `gather_report`.
            watch: with the laps training, testing and exchange.

        Returns:
            The round's metrics on rank 0, None elsewhere; and why all ranks stop after it, None if they go on.
        """
        self.stop.round_took(watch.seconds)
        seconds = watch.laps["training"], watch.laps["testing"]
        report = gather_report(self._transport, now, counts, losses, seconds, self.stop.report)
        progress = None if report is None else self._record(now, report, watch.laps["exchange"])
        pause = self.stop.agree(self._transport, watch.seconds, None if report is None else report.stop)
        self._limit_waiting(max(LEAST_TIMEOUT, _PATIENCE * self.stop.longest))
        return progress, pause

    def _record(self, now: RoundSchedule, report: RoundReport, exchange_seconds: float) -> Progress:
        """Write a round's metrics to metrics.csv and show them; rank 0 only."""
        if now.evaluates:
            self._scores = self._scores.updated(now.tested, report.tested)
            self._warn_of_infinite_losses(now.round)
            if self._validation is not None and report.validated is not None:
                self._validation = self._validation.updated(now.tested, report.validated)
        before, self._last_report = self._last_report, time.perf_counter()
        wire_down, wire_up = map(np.array, self._transport.take_moved())  # since the last round
        progress = Progress(
            round=now.round,
            participants=now.participants,
            skipped=now.skipped,
            scores=self._scores if now.evaluates else None,
            seconds={
                **report.seconds,
                "exchange": exchange_seconds,
                "checkpoint": self._checkpoints.take_seconds(),
                "round": self._last_report - before,
                **({} if (simulated := now.simulated_seconds) is None else {"simulated": simulated}),
            },
            bytes={"up": now.up_bytes, "down": now.down_bytes, "wire_up": wire_up, "wire_down": wire_down},
            memory=report.memory,
            unseen=report.unseen,
            validation=self._validation,
            trained=report.trained,
            train_loss=report.train_loss,
            measures=[*self._scores.values],
        )
        self._checkpoints.record(progress)
        self._observe(progress)
        self.stop.early.add(progress.columns)
        return progress

    def _warn_of_infinite_losses(self, round: int) -> None:
        """Warn once of clients whose test loss is not finite."""
        clients = np.flatnonzero(np.isinf(self._scores.loss)).tolist()
        if clients and not self._warned:
            self._warned = True
            _log.warning(
                "round %d: the test loss of client%s %s is not finite and counts as infinite; samples with a NaN among "
                "their scores count as wrong",
                round,
                "s" if len(clients) > 1 else "",
                format_ranges(clients),
            )

    def _limit_waiting(self, seconds: float) -> None:
        """Set how long a call waits for other ranks, unless that is configured."""
        if self._timeout is None:
            self._transport.timeout = seconds
