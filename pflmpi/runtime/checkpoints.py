"""Checkpoints, written while training continues."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.messages.kinds import Messages
from pflmpi.messages.packing import to_numpy
from pflmpi.runtime.client_state import Population, received, row_kinds
from pflmpi.runtime.progress import Progress
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.store import metrics_file
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.layout import Layout
from pflmpi.store.lock.run_lock import RunLock
from pflmpi.store.names import shard_path
from pflmpi.store.round_file import ReceivedMessage, RoundContent, write_round
from pflmpi.store.run_folder import prune
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


@dataclass(frozen=True)
class _Pending:
    """A round file that waits for its shards."""

    content: RoundContent
    layout: Layout


class Checkpoints:
    """Writes checkpoints while training continues, which waits for no more than a copy in memory.

    Each rank writes the changed clients that live there; rank 0 joins them once all are on disk.

    Attributes:
        shards_done: newest round whose shard this rank has written; -1 before the first.

    Args:
        run: the folder.
        setup: of the run.
        rank: of this process.
        attributes: written into every round file.
        layout: where the newest row of each client is.
        lock: of the run; without it nothing more is written.
        done: the round that the run continues after; None for a new run.
    """

    def __init__(
        self,
        run: Path,
        setup: Setup,
        rank: int,
        attributes: Mapping[str, str | int],
        layout: Layout,
        lock: RunLock,
        done: int | None,
    ) -> None:
        self.shards_done = -1 if done is None else done
        self._run, self._setup, self._rank, self._attributes = run, setup, rank, attributes
        self._layout = layout
        self._lock = lock
        self._writer = Writer(run)
        self._pending: list[_Pending] = []
        self._checksums: dict[str, Checksum] = {}  # of the shards that the newest round file joins
        self._joined: dict[int, tuple[str, ...]] = {}  # these shards, by round, of the round files that are kept
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Seconds for which training waited for checkpoints since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def record(self, progress: Progress, shards_done: int) -> None:
        """Write the metrics of a round (rank 0), and join the checkpoints whose shards are all on disk."""
        with self._timed():
            self._lock.check()
            metrics_file.append(self._run, list(progress.columns.values()))
            self._join(shards_done)

    def save(self, now: RoundSchedule, seen: ServerRound, population: Population, progress: Progress | None) -> None:
        """Hand over the state after a round: a copy of the clients that changed since the last checkpoint.

        Args:
            now: the round.
            seen: what rank 0 has of it.
            population: the clients that live here.
            progress: of the round, on rank 0; None before the first.
        """
        round = now.round
        with self._timed():
            rows = population.flat(now.rows[self._rank])
            self._writer.submit(lambda: self._write_shard(round, rows))
            self._layout = self._layout.updated(round, now.rows, self._setup.executor.cohort)
            if self._rank != 0:
                return
            self._pending.append(_Pending(self._content(round, seen, progress), self._layout))
            if len(now.rows) == 1:  # its shard is before it in the queue
                self._join(round)

    def finish(self, transport: Transport) -> None:
        """Wait until everything is on disk."""
        self._writer.flush()
        transport.barrier()  # every rank's shards are there
        if self._pending:
            self._join(self._pending[-1].content.round)
        self._writer.close()

    def settle(self, transport: Transport) -> None:
        """After losing a rank: bring what the survivors have to disk, and join the checkpoints that are complete."""
        self._writer.flush()
        transport.barrier()
        self._join_complete()

    def close(self) -> None:
        """Stop after a fault; checkpoints that are complete are still joined, where that is possible."""
        with contextlib.suppress(RunError):
            self._writer.flush()
            self._join_complete()
        self._writer.abandon()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def _join_complete(self) -> None:
        while self._pending and all((self._run / name).exists() for name in self._pending[0].layout.files):
            self._join(self._pending[0].content.round)
            self._writer.flush()

    def _content(self, round: int, seen: ServerRound, progress: Progress | None) -> RoundContent:
        """Copies of what rank 0 stores; a tensor that is both in the server's state and published is copied once."""
        setup, copies = self._setup, dict[int, np.ndarray]()
        messages, published = received(setup.algorithm, setup.task, setup.templates), seen.published or {}

        def copied(state: Tree) -> Arrays:
            for _, leaf in tree.leaves(state):
                if id(leaf) not in copies:
                    copies[id(leaf)] = to_numpy(leaf).copy()
            return {path: copies[id(leaf)] for path, leaf in tree.leaves(state)}

        return RoundContent(
            round,
            server=copied(seen.server),
            metrics={} if progress is None else progress.arrays(),
            bytes={} if progress is None else progress.bytes,
            received={name: ReceivedMessage(copied(published[name]), own) for name, own in messages.items()},
            diagnostics={name: to_numpy(values).copy() for name, values in seen.measured.items()},
            partition={"train_samples": setup.declared.num_train, "test_samples": setup.num_test},
            normalisation=setup.task.normalisation,
            history=np.frombuffer(metrics_file.text(self._run), np.uint8),
        )

    def _join(self, shards_done: int) -> None:
        while self._pending and self._pending[0].content.round <= shards_done:
            ready = self._pending.pop(0)
            self._writer.submit(lambda ready=ready: self._write_round(ready))  # type: ignore[misc]

    def _write_shard(self, round: int, rows: ClientRows) -> None:
        if rows:
            self._lock.check()
            attributes = {"run": self._attributes["run"], "round": round, "rank": self._rank}
            write_shard(shard_path(self._run, round, self._rank), rows, attributes)
        self.shards_done = round

    def _write_round(self, ready: _Pending) -> None:
        self._lock.check()
        kinds = row_kinds(self._setup.templates)
        self._checksums = write_round(self._run, ready.content, ready.layout, kinds, self._attributes, self._checksums)
        self._joined[ready.content.round] = tuple(self._checksums)
        prune(self._run, self._setup.checkpoint.keep, joined=self._joined)
        if len(self._joined) > max(self._setup.checkpoint.keep, 1):
            del self._joined[min(self._joined)]
