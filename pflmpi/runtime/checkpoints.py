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
from pflmpi.messages.deliver import deliver
from pflmpi.messages.kinds import Messages, Own
from pflmpi.messages.packing import to_numpy
from pflmpi.runtime.client_state import Population, find_row_types, stored_messages
from pflmpi.runtime.progress import Progress
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.store import metrics_file
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.layout import Layout
from pflmpi.store.names import cohort_name, round_path, shard_path
from pflmpi.store.pruning import prune
from pflmpi.store.round_file import ReceivedMessage, RoundContent, write_round
from pflmpi.store.run_lock import RunLock
from pflmpi.store.shard import Arrays, ClientRows, write_shard
from pflmpi.store.writer import Writer
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

_SHARD_TIMEOUT = 600.0  # seconds to wait for another rank's shard
_FIRST_POLL, _LONGEST_POLL = 0.01, 0.5  # seconds between two polls for it, which grow
_MIN_OWN_SHARD = 1 << 24  # bytes of changed rows from which a rank writes its own shard
_MAX_SHARED_SHARD = 1 << 26  # bytes in a shard with rows of several ranks
_CACHED_POLL = 0.1  # seconds between two polls above which the cache of missing names is invalidated


@dataclass(frozen=True)
class ServerRound:
    """Results of an exchange on rank 0; empty on other ranks."""

    server: Tree  # the server's state
    published: Messages | None  # what the clients receive
    diagnostics: Mapping[str, Tensor]


class Checkpoints:
    """Writes checkpoints in a background thread; training waits only for the copy in memory.

    The thread of each rank writes the rows of the clients that changed. Rank 0's then writes the round file, which
    completes the checkpoint.

    Args:
        attributes: attributes of every round file.
        layout: the file with the newest row of each client.
        lock: lock of the run; once it is lost, nothing is written any more.
        keep: how many of the newest checkpoints stay on disk; 0 for all.

    Attributes:
        written: rounds whose checkpoint this process has completed; rank 0 only.
    """

    def __init__(
        self,
        run: Path,
        setup: Setup,
        transport: Transport,
        attributes: Mapping[str, str | int],
        layout: Layout,
        lock: RunLock,
        keep: int,
    ) -> None:
        self._run, self._transport, self._attributes = run, transport, attributes
        self._layout, self._lock, self._keep = layout, lock, keep
        self._cohort, federation = setup.executor.cohort, setup.executor.federation
        self._client_templates, self._home = setup.templates, setup.placement.home
        self._templates = find_row_types(setup.templates)
        sizes = np.array([tree.num_bytes(template) for template in setup.templates], np.int64)
        self._row_bytes = sizes[self._cohort]
        names = stored_messages(setup.algorithm, setup.task, setup.templates)
        self._is_own = {name: isinstance(setup.declared.down[name], Own) for name in names}  # by stored message
        self._partition = {"train_samples": federation.num_train, "test_samples": federation.num_test}
        if federation.validation:
            self._partition["validation_samples"] = federation.num_validation
        self._normalisation = setup.task.normalisation
        self._hosts = [peer.host for peer in transport.peers] or [""] * transport.size
        self._writer = Writer(run)
        self._closing = threading.Event()  # set after an error: stop waiting for other ranks' shards
        self._shards: dict[str, Checksum] = {}  # of the newest round file
        self._shards_by_round: dict[int, tuple[str, ...]] = {}  # of the checkpoints that are still on disk
        self._metrics = metrics_file.checksum(metrics_file.read_bytes(run)) if transport.rank == 0 else None
        self._seconds = 0.0
        self.written: list[int] = []

    def take_seconds(self) -> float:
        """Returns and resets the seconds for which training waited for checkpoints."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def record(self, progress: Progress) -> None:
        """Append the metrics of a round to metrics.csv; rank 0 only."""
        with self._timed():
            self._lock.check()
            self._writer.check()
            assert self._metrics is not None
            columns = progress.columns
            self._metrics = metrics_file.append(self._run, [*columns.values()], [*columns], self._metrics)

    def save(
        self, now: RoundSchedule, server_round: ServerRound, population: Population, progress: Progress | None
    ) -> None:
        """Copy the state after a round and pass it to the writer thread; every rank calls this.

        Args:
            progress: metrics of the round, on rank 0; None before the first round.
        """
        with self._timed():
            writers = choose_shard_writers([int(self._row_bytes[clients].sum()) for clients in now.rows], self._hosts)
            written = group_by_writer(now.rows, writers)
            rows = collect_rows(self._transport, population, self._client_templates, self._home, written)
            content = None if self._metrics is None else self._content(now.round, server_round, progress, self._metrics)
            self._writer.submit(lambda: self._write(now.round, rows, content, written))

    def finish(self) -> None:
        """Wait until all ranks have written everything; every rank calls this."""
        self._writer.close()
        self._transport.barrier()

    def close(self) -> None:
        """Stop after an error; checkpoints that were already passed to the writer are still written if possible."""
        self._closing.set()
        with contextlib.suppress(PflmpiError):
            self._writer.flush()
        self._writer.abandon()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def _content(
        self, round: int, server_round: ServerRound, progress: Progress | None, metrics: Checksum
    ) -> RoundContent:
        """Content of the round file; arrays that share memory with the server's state are copied, each once."""
        arrays, published = dict[int, np.ndarray](), server_round.published or {}
        server_memory = {leaf.untyped_storage().data_ptr() for _, leaf in tree.leaves(server_round.server)}

        def to_arrays(state: Tree) -> Arrays:
            for _, leaf in tree.leaves(state):
                if id(leaf) not in arrays:
                    is_shared = leaf.untyped_storage().data_ptr() in server_memory
                    arrays[id(leaf)] = np.array(to_numpy(leaf), copy=is_shared)
            return {path: arrays[id(leaf)] for path, leaf in tree.leaves(state)}

        return RoundContent(
            round,
            server=to_arrays(server_round.server),
            metrics={} if progress is None else progress.arrays(),
            bytes={} if progress is None else progress.bytes,
            received={name: ReceivedMessage(to_arrays(published[name]), own) for name, own in self._is_own.items()},
            diagnostics={name: to_numpy(values).copy() for name, values in server_round.diagnostics.items()},
            partition=self._partition,
            normalisation=self._normalisation,
            metrics_file=metrics,
        )

    def _write(self, round: int, rows: ClientRows, content: RoundContent | None, written: Sequence[np.ndarray]) -> None:
        """Write the rows and, on rank 0, the round file; `written` as `group_by_writer` gives them."""
        self._lock.check()
        if rows:
            described = {"run": self._attributes["run"], "round": round, "rank": self._transport.rank}
            write_shard(shard_path(self._run, round, self._transport.rank), rows, described)
        if content is None:
            return
        metrics_file.flush(self._run)
        self._layout = layout = self._layout.updated(round, written, self._cohort)
        for name in layout.files:
            if name not in self._shards:
                self._wait_for(self._run / name)
        self._lock.check()
        self._shards = write_round(self._run, content, layout, self._templates, self._attributes, self._shards)
        self.written.append(round)
        if self._keep:
            self._shards_by_round[round] = layout.files
            prune(self._run, self._keep, self._shards_by_round)
            self._shards_by_round = {
                number: files
                for number, files in self._shards_by_round.items()
                if round_path(self._run, number).exists()
            }

    def _wait_for(self, shard: Path) -> None:
        """Wait until another rank has written its shard."""
        end, pause = time.monotonic() + _SHARD_TIMEOUT, _FIRST_POLL
        while not shard.exists():
            self._lock.check()
            if self._closing.wait(pause) or time.monotonic() > end:
                raise RunError(f"{shard} is missing, which another rank writes; resume the run, or look at that rank")
            if pause > _CACHED_POLL:
                _invalidate_missing_names(shard)
            pause = min(2 * pause, _LONGEST_POLL)


def _invalidate_missing_names(path: Path) -> None:
    """Invalidate NFS's cache of missing names, which lasts up to a minute, by changing the folder of the file."""
    temporary = path.with_name(f"{path.stem}.look.h5{atomic.TEMPORARY}")  # a resumed run removes it if it is left over
    temporary.touch()
    temporary.unlink()


def choose_shard_writers(sizes: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """Returns, for each rank, the rank that writes its rows; ranks of a node with few rows share a writer.

    Args:
        sizes: bytes of each rank's rows.
        hosts: host name of each rank.

    >>> choose_shard_writers([5, 0, _MIN_OWN_SHARD, 7, 7], ["a", "a", "a", "a", "b"])
    [0, 1, 2, 0, 4]
    """
    writers, first, total = list(range(len(sizes))), dict[str, int](), dict[str, int]()
    for rank, (size, host) in enumerate(zip(sizes, hosts, strict=True)):
        if not 0 < size < _MIN_OWN_SHARD:
            continue
        if host not in first or total[host] + size > _MAX_SHARED_SHARD:
            first[host], total[host] = rank, 0
        writers[rank], total[host] = first[host], total[host] + size
    return writers


def group_by_writer(clients: Sequence[np.ndarray], writers: Sequence[int]) -> list[np.ndarray]:
    """Returns, for each rank, the ascending ids of the clients whose rows it writes.

    Args:
        clients: by rank, the ids of the clients whose state lives there.
        writers: by rank, the rank that writes their rows.
    """
    parts: dict[int, list[np.ndarray]] = {}
    for rank, ids in enumerate(clients):
        if len(ids):  # with many ranks, few have changed rows
            parts.setdefault(writers[rank], []).append(ids)
    no_clients = np.empty(0, np.int64)
    return [np.sort(np.concatenate(parts[rank])) if rank in parts else no_clients for rank in range(len(clients))]


def collect_rows(
    transport: Transport,
    population: Population,
    templates: Sequence[Tree],
    home: np.ndarray | None,
    written: Sequence[np.ndarray],
) -> ClientRows:
    """Receives from other ranks the rows that this rank writes; all ranks call this.

    Args:
        templates: one per cohort, the state of a client.
        home: [N] the rank of each client; None where clients have no state.
        written: by rank, the ascending ids of the clients whose rows it writes.
    """
    rows: ClientRows = {}
    for number, (template, cohort) in enumerate(zip(templates, population.cohorts, strict=True)):
        clients = [ids[population.cohort[ids] == number] if len(ids) else ids for ids in written]
        if not any(map(len, clients)) or not any(tree.leaves(template)):
            continue
        assert home is not None, "clients with state have a home"
        leaves = tree.leaves(deliver(transport, clients, home, cohort.compact, template, down=False))
        if len(ids := clients[transport.rank]):
            rows[cohort_name(number)] = ids, {path: leaf.numpy() for path, leaf in leaves}
    return rows
