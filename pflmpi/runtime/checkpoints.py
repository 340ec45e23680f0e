"""Checkpoints while training goes on: each rank writes its clients, rank 0 joins them once all are on disk."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.learning.training import TrainingConfig
from pflmpi.messages.packing import to_numpy
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.config import CheckpointConfig
from pflmpi.runtime.progress import Progress
from pflmpi.store import metrics_file
from pflmpi.store.layout import Layout
from pflmpi.store.names import cohort_name, shard_path
from pflmpi.store.round_file import RoundContent, write_round
from pflmpi.store.run_folder import prune
from pflmpi.store.shard import write_shard
from pflmpi.store.writer import Writer
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Fixed:
    """What stays the same for all checkpoints of a run.

    Attributes:
        run: the folder.
        rank: of this process.
        hosted: for each rank the ascending ids of the clients that live there and keep anything.
        cohort: [N].
        templates: for each cohort name, path -> (shape, dtype) of what a client keeps.
        attributes: written into every round file.
        training, seed: they tell who took part in a round.
        settings: the `checkpoint` section.
    """

    run: Path
    rank: int
    hosted: list[np.ndarray]
    cohort: np.ndarray
    templates: dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]]
    attributes: dict[str, str | int | float]
    training: TrainingConfig
    seed: int
    settings: CheckpointConfig


@dataclass
class _Pending:
    round: int
    server: Arrays
    metrics: Arrays
    bytes: Arrays
    layout: Layout


class Checkpoints:
    """Writes the state after chosen rounds, without stopping the training for longer than a copy in memory."""

    def __init__(self, fixed: Fixed, layout: Layout, done: int) -> None:
        self._fixed = fixed
        self._layout = layout
        self._last = done  # newest round that has been handed over
        self._writer = Writer(f"{fixed.run}")
        self._pending: list[_Pending] = []
        self._progress: Progress | None = None
        self.shards_done = done
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Return how long the training stood still for checkpoints since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def start(self, server: Tree, population: Population) -> None:
        """Write the state before the first round: every client has a row from then on."""
        with self._standing_still():
            self._save(0, server, population, np.arange(len(self._fixed.cohort)))

    def record(self, progress: Progress, shards_done: int) -> None:
        """Take note of a round on rank 0, and join the checkpoints whose shards are all on disk."""
        with self._standing_still():
            metrics_file.append(self._fixed.run, progress.line())
            self._progress = progress
            self._join(shards_done)

    def save(self, round: int, server: Tree, population: Population) -> None:
        """Hand over the state after a round: a copy of the clients that changed since the last checkpoint."""
        n = len(self._fixed.cohort)
        rounds = range(self._last + 1, round + 1)
        changed = [self._fixed.training.participants(self._fixed.seed, each, n) for each in rounds]
        with self._standing_still():
            self._save(round, server, population, np.unique(np.concatenate(changed)))

    def finish(self, transport: Transport) -> None:
        """Wait until everything is on disk."""
        self._writer.flush()
        transport.barrier()  # every rank's shards are there
        self._join(self._last)
        self._writer.close()

    def settle(self, transport: Transport) -> None:
        """Bring everything to disk that the ranks which are left have; rank 0 joins the checkpoints that are whole."""
        self._writer.flush()
        transport.barrier()
        self._join_whole()

    def close(self) -> None:
        """Stop after a fault; checkpoints whose shards are all on disk are still joined, where that is possible."""
        with contextlib.suppress(RunError):
            self._writer.flush()
            self._join_whole()
        self._writer.abandon()

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def _join_whole(self) -> None:
        run = self._fixed.run
        while self._pending and all((run / name).exists() for name in self._pending[0].layout.files):
            self._join(self._pending[0].round)
            self._writer.flush()

    def _save(self, round: int, server: Tree, population: Population, changed: np.ndarray) -> None:
        fixed = self._fixed
        per_rank = [clients[np.isin(clients, changed)] for clients in fixed.hosted]
        rows = population.flat(per_rank[fixed.rank])
        path = shard_path(fixed.run, round, fixed.rank)
        self._writer.submit(lambda: self._write_shard(path, rows, round))
        self._layout = self._layout.updated(round, per_rank, fixed.cohort)
        self._last = round
        if fixed.rank == 0:
            arrays = {name: to_numpy(leaf).copy() for name, leaf in tree.leaves(server)}
            metrics, moved = _metrics(self._progress, round)
            self._pending.append(_Pending(round, arrays, metrics, moved, self._layout))
            if len(fixed.hosted) == 1:  # its shard is before it in the queue
                self._join(round)

    def _write_shard(self, path: Path, rows: dict[str, tuple[np.ndarray, Arrays]], round: int) -> None:
        if rows:
            write_shard(path, rows)
        self.shards_done = round

    def _join(self, shards_done: int) -> None:
        while self._pending and self._pending[0].round <= shards_done:
            ready = self._pending.pop(0)
            self._writer.submit(lambda ready=ready: self._write_round(ready))  # type: ignore[misc]

    def _write_round(self, ready: _Pending) -> None:
        fixed = self._fixed
        content = RoundContent(ready.round, ready.server, ready.metrics, ready.bytes)
        write_round(fixed.run, content, ready.layout, fixed.templates, fixed.attributes)
        prune(fixed.run, fixed.settings.keep)


def templates(clients: list[Tree]) -> dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]]:
    """Return, for each cohort, path -> (shape, dtype) of what a client keeps."""
    return {
        cohort_name(number): {
            path: (tuple(leaf.shape), to_numpy(leaf.new_empty((), device="cpu")).dtype)
            for path, leaf in tree.leaves(client)
        }
        for number, client in enumerate(clients)
    }


def _metrics(progress: Progress | None, round: int) -> tuple[Arrays, Arrays]:
    if progress is None or progress.round != round:
        return {}, {}
    metrics: Arrays = {"participants": progress.participants}
    metrics.update({f"seconds_{name}": np.array(value) for name, value in progress.seconds.items()})
    if progress.scores is not None:
        scores = progress.scores
        metrics.update(correct=scores.correct, total=scores.total, accuracy=scores.accuracy)
        metrics.update(accuracy_mean=np.array(scores.mean), accuracy_weighted=np.array(scores.weighted))
    return metrics, progress.bytes
