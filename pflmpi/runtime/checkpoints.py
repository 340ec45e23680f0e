"""Checkpoints while training goes on: each rank writes its clients, rank 0 joins them once all are on disk."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from pflmpi import tree
from pflmpi.errors import RunError
from pflmpi.messages.kinds import Messages
from pflmpi.messages.packing import to_numpy
from pflmpi.runtime.client_state import Population
from pflmpi.runtime.progress import Progress
from pflmpi.runtime.schedule import RoundSchedule
from pflmpi.store import metrics_file
from pflmpi.store.checked_hdf5 import Seal
from pflmpi.store.layout import Layout
from pflmpi.store.names import cohort_name, shard_path
from pflmpi.store.round_file import ReceivedMessage, RoundContent, write_round
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
        cohort: [N].
        templates: for each cohort name, path -> (shape, dtype) of what a client keeps.
        attributes: written into every round file.
        keep: how many of the newest checkpoints stay; 0 for all.
        received: names of the messages that are stored beside the server's state, because personal models are put
            together from them and clients do not keep them; true where each client has a row of its own.
        partition: samples of each client, by name.
    """

    run: Path
    rank: int
    cohort: np.ndarray
    templates: dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]]
    attributes: dict[str, str | int]
    keep: int
    received: Mapping[str, bool] = field(default_factory=dict)
    partition: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerRound:
    """What rank 0 knows of a round; the other ranks know nothing of it.

    Attributes:
        server: its state.
        published: what the clients receive.
        measured: diagnostics by name.
        progress: None before the first round.
    """

    server: Tree
    published: Messages | None
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    progress: Progress | None = None


@dataclass
class _Pending:
    content: RoundContent
    layout: Layout


class Checkpoints:
    """Writes the state after chosen rounds, without stopping the training for longer than a copy in memory."""

    def __init__(self, fixed: Fixed, layout: Layout, done: int | None) -> None:
        self._fixed = fixed
        self._layout = layout
        self._writer = Writer(f"{fixed.run}")
        self._pending: list[_Pending] = []
        self._seals: dict[str, Seal] = {}
        self.shards_done = -1 if done is None else done
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Return how long the training stood still for checkpoints since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def record(self, progress: Progress, shards_done: int) -> None:
        """Take note of a round on rank 0, and join the checkpoints whose shards are all on disk."""
        with self._standing_still():
            metrics_file.append(self._fixed.run, progress.line())
            self._join(shards_done)

    def save(self, now: RoundSchedule, seen: ServerRound, population: Population) -> None:
        """Hand over the state after a round: a copy of the clients that changed since the last checkpoint.

        Args:
            now: the round.
            seen: what rank 0 has of it.
            population: the clients that live here.
        """
        fixed, round = self._fixed, now.round
        with self._standing_still():
            rows = population.flat(now.rows[fixed.rank])
            self._writer.submit(lambda: self._write_shard(rows, round))
            self._layout = self._layout.updated(round, now.rows, fixed.cohort)
            if fixed.rank != 0:
                return
            self._pending.append(_Pending(self._content(round, seen), self._layout))
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
            self._join(self._pending[0].content.round)
            self._writer.flush()

    def _content(self, round: int, seen: ServerRound) -> RoundContent:
        """Copies of what rank 0 stores; a tensor that is both in the server's state and published is copied once."""
        copies: dict[int, np.ndarray] = {}
        published = seen.published or {}

        def copied(state: Tree) -> Arrays:
            for _, leaf in tree.leaves(state):
                if id(leaf) not in copies:
                    copies[id(leaf)] = to_numpy(leaf).copy()
            return {path: copies[id(leaf)] for path, leaf in tree.leaves(state)}

        return RoundContent(
            round,
            server=copied(seen.server),
            metrics={} if seen.progress is None else seen.progress.arrays(),
            bytes={} if seen.progress is None else seen.progress.bytes,
            received={
                name: ReceivedMessage(copied(published[name]), own) for name, own in self._fixed.received.items()
            },
            diagnostics={name: to_numpy(values).copy() for name, values in seen.measured.items()},
            partition=dict(self._fixed.partition),
        )

    def _write_shard(self, rows: dict[str, tuple[np.ndarray, Arrays]], round: int) -> None:
        fixed = self._fixed
        if rows:
            attributes = {"run": fixed.attributes["run"], "round": round, "rank": fixed.rank}
            write_shard(shard_path(fixed.run, round, fixed.rank), rows, attributes)
        self.shards_done = round

    def _join(self, shards_done: int) -> None:
        while self._pending and self._pending[0].content.round <= shards_done:
            ready = self._pending.pop(0)
            self._writer.submit(lambda ready=ready: self._write_round(ready))  # type: ignore[misc]

    def _write_round(self, ready: _Pending) -> None:
        fixed = self._fixed
        self._seals = write_round(
            fixed.run, ready.content, ready.layout, fixed.templates, fixed.attributes, self._seals
        )
        prune(fixed.run, fixed.keep)


def templates(clients: list[Tree]) -> dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]]:
    """Return, for each cohort, path -> (shape, dtype) of what a client keeps."""
    return {
        cohort_name(number): {
            path: (tuple(leaf.shape), to_numpy(leaf.new_empty((), device="cpu")).dtype)
            for path, leaf in tree.leaves(client)
        }
        for number, client in enumerate(clients)
    }
