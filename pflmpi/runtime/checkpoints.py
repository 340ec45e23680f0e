"""Checkpoints, written while training continues."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from pflmpi import tree
from pflmpi.errors import PflmpiError
from pflmpi.messages.kinds import Messages
from pflmpi.messages.packing import to_numpy
from pflmpi.runtime.client_state import Population, received, received_by_all, row_kinds
from pflmpi.runtime.progress import Progress
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.layout import Layout
from pflmpi.store.lock.run_lock import RunLock
from pflmpi.store.metrics import metrics_file
from pflmpi.store.names import shard_path
from pflmpi.store.records import content, sharing
from pflmpi.store.records.background import Background
from pflmpi.store.records.content import Checkpoint
from pflmpi.store.records.conversion import finish
from pflmpi.store.records.segments import RecordFile
from pflmpi.store.round_file import RoundContent
from pflmpi.store.shard import Arrays, ClientRows, write_shard
from pflmpi.store.writer import Writer
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree


@dataclass(frozen=True)
class ServerRound:
    """What rank 0 has after an exchange; the other ranks have nothing of it.

    Attributes:
        server: its state.
        published: what the clients receive.
        measured: diagnostics by name.
    """

    server: Tree
    published: Messages | None
    measured: Mapping[str, Tensor]


class Checkpoints:
    """Writes checkpoints while training continues, which waits for no more than a copy in memory.

    Each rank records the changed clients that live there, and rank 0 the rest. A process beside rank 0 turns that into
    HDF5; see `store.records`.

    Args:
        run: the folder.
        setup: of the run.
        rank: of this process.
        attributes: written into every round file.
        layout: where the newest row of each client is.
        lock: of the run; without it nothing more is written.
    """

    def __init__(
        self, run: Path, setup: Setup, rank: int, attributes: Mapping[str, str | int], layout: Layout, lock: RunLock
    ) -> None:
        self._run, self._setup, self._rank, self._attributes = (run, setup, rank, attributes)
        self._layout = layout
        self._lock = lock
        self._kinds = row_kinds(setup.templates)
        self._row_bytes = sharing.row_bytes(self._kinds, setup.executor.cohort)
        self._writer = Writer(run)
        self._records = RecordFile(run, rank)
        self._background = Background(run, lock)
        self._metrics = metrics_file.checksum(metrics_file.text(run)) if rank == 0 else None  # of metrics.csv so far
        self._seconds = 0.0
        self._last: int | None = None  # round that was handed over

    def take_seconds(self) -> float:
        """Seconds for which training waited for checkpoints since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def record(self, progress: Progress) -> None:
        """Write the metrics of a round (rank 0)."""
        with self._timed():
            self._lock.check()
            self._background.check()
            assert self._metrics is not None
            line = metrics_file.append(self._run, list(progress.columns.values()))
            self._metrics = metrics_file.checksum(line.encode(), self._metrics)

    def save(self, now: RoundSchedule, seen: ServerRound, population: Population, progress: Progress | None) -> None:
        """Hand over the state after a round: a copy of the clients that changed since the last checkpoint.

        Args:
            now: the round.
            seen: what rank 0 has of it.
            population: the clients that live here.
            progress: of the round, on rank 0; None before the first.
        """
        with self._timed():
            rows = population.flat(now.rows[self._rank])
            rest: Checkpoint | None = None
            if self._metrics is not None:
                rest = self._checkpoint(now, seen, progress, self._metrics)
            own = self._row_bytes[now.rows[self._rank]].sum() > sharing.OWN
            self._writer.submit(lambda: self._write(now.round, rows, rest, own))
            self._last = now.round

    def finish(self, transport: Transport) -> None:
        """Wait until everything is on disk, as HDF5."""
        self._writer.close()
        transport.barrier()  # every rank's records are there
        if self._rank == 0:
            self._background.end()
            finish(self._run, self._last)

    def close(self) -> None:
        """Stop after a fault; checkpoints that are complete still become HDF5, where that is possible."""
        with contextlib.suppress(PflmpiError):
            self._writer.flush()
        self._writer.abandon()
        if self._rank == 0:
            with contextlib.suppress(PflmpiError):
                self._background.end()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def _checkpoint(
        self, now: RoundSchedule, seen: ServerRound, progress: Progress | None, metrics: Checksum
    ) -> Checkpoint:
        """What rank 0 has of a checkpoint, and which ranks have the rest."""
        cohort = self._setup.executor.cohort
        layout, ranks = sharing.shared(self._layout, now.round, now.rows, self._row_bytes, cohort)
        self._layout = layout.only([cohort for cohort, kinds in self._kinds.items() if kinds])
        return Checkpoint(
            self._content(now.round, seen, progress, metrics),
            self._layout,
            self._kinds,
            self._attributes,
            ranks,
            self._setup.checkpoint.keep,
        )

    def _content(self, round: int, seen: ServerRound, progress: Progress | None, metrics: Checksum) -> RoundContent:
        """What rank 0 stores: copies of what shares memory with the server's state, which goes on, each once."""
        setup, arrays = self._setup, dict[int, np.ndarray]()
        names, published = (received(setup.algorithm, setup.task, setup.templates), seen.published or {})
        in_use = {leaf.untyped_storage().data_ptr() for _, leaf in tree.leaves(seen.server)}

        def stored(state: Tree) -> Arrays:
            for _, leaf in tree.leaves(state):
                if id(leaf) not in arrays:
                    arrays[id(leaf)] = np.array(to_numpy(leaf), copy=leaf.untyped_storage().data_ptr() in in_use)
            return {path: arrays[id(leaf)] for path, leaf in tree.leaves(state)}

        return RoundContent(
            round,
            server=stored(seen.server),
            metrics={} if progress is None else progress.arrays(),
            bytes={} if progress is None else progress.bytes,
            received={name: received_by_all(setup.declared.down[name], stored(published[name])) for name in names},
            diagnostics={name: to_numpy(values).copy() for name, values in seen.measured.items()},
            partition={"train_samples": setup.declared.num_train, "test_samples": setup.num_test},
            normalisation=setup.task.normalisation,
            metrics_file=metrics,
        )

    def _write(self, round: int, rows: ClientRows, rest: Checkpoint | None, own: bool) -> None:
        self._lock.check()
        if rest is not None:
            metrics_file.flush(self._run)
        if own:
            attributes = {"run": self._attributes["run"], "round": round, "rank": self._rank}
            write_shard(shard_path(self._run, round, self._rank), rows, attributes)
            rows = {}
        if rows or rest is not None:
            self._records.append(content.pack(round, rows, rest))
        if rest is not None:
            self._background.begin()
