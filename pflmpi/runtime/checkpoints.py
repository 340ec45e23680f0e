"""Checkpoints, written while training continues."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from pflmpi import atomic, tree
from pflmpi.errors import PflmpiError, RunError
from pflmpi.messages.kinds import Messages
from pflmpi.messages.packing import to_numpy
from pflmpi.runtime.client_state import Population, received, received_by_all, row_kinds
from pflmpi.runtime.progress import Progress
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.shard_writers import clients_written, row_bytes, send_to_writers, shard_writers
from pflmpi.store import metrics_file
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.layout import Layout
from pflmpi.store.names import round_path, shard_path
from pflmpi.store.pruning import prune
from pflmpi.store.round_file import RoundContent, write_round
from pflmpi.store.run_lock import RunLock
from pflmpi.store.shard import Arrays, ClientRows, write_shard
from pflmpi.store.writer import Writer
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

_PATIENCE = 600.0  # seconds to wait for another rank's shard
_FIRST_POLL, _LONGEST_POLL = 0.01, 0.5  # seconds between two polls for it, which grow
_CACHED_POLL = 0.1  # seconds between two polls above which the cache of missing names is invalidated


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

    A thread of each rank writes the rows of clients that have changed; that of rank 0 then the round file, which makes
    them a checkpoint.

    Args:
        run: the folder.
        setup: of the run.
        transport: to the other ranks.
        attributes: written into every round file.
        layout: where the newest row of each client is.
        lock: of the run; without it nothing more is written.
    """

    def __init__(
        self,
        run: Path,
        setup: Setup,
        transport: Transport,
        attributes: Mapping[str, str | int],
        layout: Layout,
        lock: RunLock,
    ) -> None:
        self._run, self._setup, self._transport, self._attributes = run, setup, transport, attributes
        self._layout, self._lock = layout, lock
        self._templates = row_kinds(setup.templates)
        self._received = received(setup.algorithm, setup.task, setup.templates)
        self._partition = {"train_samples": setup.declared.num_train, "test_samples": setup.num_test}
        self._normalisation = setup.task.normalisation
        self._row_bytes = row_bytes(self._templates, setup.executor.cohort)
        self._hosts = [peer.host for peer in transport.peers] or [""] * transport.size
        self._writer = Writer(run)
        self._ending = threading.Event()  # after a fault: other ranks' shards are not waited for
        self._shards: dict[str, Checksum] = {}  # of the newest round file
        self._joined: dict[int, tuple[str, ...]] = {}  # shards of the newest rounds
        self._metrics = metrics_file.checksum(metrics_file.text(run)) if transport.rank == 0 else None  # so far
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Seconds for which training waited for checkpoints since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def record(self, progress: Progress) -> None:
        """Write the metrics of a round (rank 0)."""
        with self._timed():
            self._lock.check()
            self._writer.check()
            assert self._metrics is not None
            line = metrics_file.append(self._run, list(progress.columns.values()))
            self._metrics = metrics_file.checksum(line.encode(), self._metrics)

    def save(self, now: RoundSchedule, seen: ServerRound, population: Population, progress: Progress | None) -> None:
        """Hand over the state after a round: a copy of the clients that changed since the last checkpoint.

        Every rank calls this.

        Args:
            now: the round.
            seen: what rank 0 has of it.
            population: the clients that live here.
            progress: of the round, on rank 0; None before the first.
        """
        with self._timed():
            cohort = self._setup.executor.cohort
            clients = now.rows
            writers = shard_writers([int(self._row_bytes[ids].sum()) for ids in clients], self._hosts)
            rows = population.flat(clients[self._transport.rank])
            rows = send_to_writers(self._transport, rows, clients, writers, self._templates, cohort)
            changed = clients_written(clients, writers)
            content = None if self._metrics is None else self._content(now.round, seen, progress, self._metrics)
            self._writer.submit(lambda: self._write(now.round, rows, content, changed))

    def finish(self) -> None:
        """Wait until everything is on disk; every rank calls this."""
        self._writer.close()
        self._transport.barrier()

    def close(self) -> None:
        """Stop after a fault, once what this rank has of checkpoints is on disk, where that is possible."""
        self._ending.set()
        with contextlib.suppress(PflmpiError):
            self._writer.flush()
        self._writer.abandon()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def _content(self, round: int, seen: ServerRound, progress: Progress | None, metrics: Checksum) -> RoundContent:
        """What rank 0 stores: copies of what shares memory with the server's state, which goes on, each once."""
        down, published, arrays = self._setup.declared.down, seen.published or {}, dict[int, np.ndarray]()
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
            received={name: received_by_all(down[name], stored(published[name])) for name in self._received},
            diagnostics={name: to_numpy(values).copy() for name, values in seen.measured.items()},
            partition=self._partition,
            normalisation=self._normalisation,
            metrics_file=metrics,
        )

    def _write(self, round: int, rows: ClientRows, content: RoundContent | None, changed: Sequence[np.ndarray]) -> None:
        """Write the rows and, on rank 0, the round file; `changed` are the clients whose rows each rank writes."""
        self._lock.check()
        if rows:
            described = {"run": self._attributes["run"], "round": round, "rank": self._transport.rank}
            write_shard(shard_path(self._run, round, self._transport.rank), rows, described)
        if content is None:
            return
        metrics_file.flush(self._run)
        self._layout = layout = self._layout.updated(round, changed, self._setup.executor.cohort)
        for name in layout.files:
            if name not in self._shards:
                self._wait_for(self._run / name)
        self._lock.check()
        self._shards = write_round(self._run, content, layout, self._templates, self._attributes, self._shards)
        if keep := self._setup.checkpoint.keep:
            self._joined[round] = layout.files
            prune(self._run, keep, self._joined)
            self._joined = {kept: files for kept, files in self._joined.items() if round_path(self._run, kept).exists()}

    def _wait_for(self, shard: Path) -> None:
        """Wait until another rank has written its shard."""
        end, pause = time.monotonic() + _PATIENCE, _FIRST_POLL
        while not shard.exists():
            self._lock.check()
            if self._ending.wait(pause) or time.monotonic() > end:
                raise RunError(f"{shard} is missing, which another rank writes; resume the run, or look at that rank")
            if pause > _CACHED_POLL:
                _invalidate_missing_names(shard)
            pause = min(2 * pause, _LONGEST_POLL)


def _invalidate_missing_names(path: Path) -> None:
    """Invalidate NFS's cache of missing names, which lasts up to a minute, by changing the folder of the file."""
    other = path.with_name(f"{path.stem}.look.h5{atomic.TEMPORARY}")  # which a continuation removes if it is left
    other.touch()
    other.unlink()
