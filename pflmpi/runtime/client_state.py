"""The persistent state of a rank's clients: one row of each leaf per client.

Rows are in memory or in a mapped file, and occupy space only once they are written; unchanged rows share one copy.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pflmpi import atomic, tree
from pflmpi.algorithms.base import Algorithm, depends_on_client, initial_client, initial_received
from pflmpi.errors import ConfigError, RunError
from pflmpi.learning import personal
from pflmpi.learning.local_training import OPTIMIZER
from pflmpi.learning.optimizers import init_optimizer_state
from pflmpi.learning.task import HOST, Task
from pflmpi.machine import expand_path
from pflmpi.messages.declared import client_template
from pflmpi.messages.downlink import Reply
from pflmpi.messages.kinds import Messages
from pflmpi.messages.packing import to_numpy
from pflmpi.messages.uplink_transforms import RESIDUAL, UplinkConfig, residual_like
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.contract import ANSWERED, RECEIVED, answer_templates, calling
from pflmpi.store.names import cohort_name
from pflmpi.text import format_bytes
from pflmpi.tree import Tree

_ALIGNMENT = 64  # bytes


class Storage:
    """Zero-initialised bytes, in memory or in an unnamed file, which disappears with the process.

    Attributes:
        bytes: [rows, row_bytes] uint8.

    Args:
        folder: where to create the file; None for memory.

    Raises:
        ConfigError: the memory or file cannot be mapped.
    """

    def __init__(self, rows: int, row_bytes: int, folder: Path | None = None) -> None:
        self._folder = folder
        self._file: int | None = None
        length = rows * row_bytes
        try:
            if folder is not None:
                with tempfile.TemporaryFile(dir=folder) as file:
                    self._file = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._file)
            flat = torch.frombuffer(_map_memory(self._file, max(length, 1)), dtype=torch.uint8)
        except OSError as error:
            where, cure = "memory", "set runtime.state=disk"
            if folder is not None:
                where, cure = str(folder), "name another folder as runtime.scratch"
            raise ConfigError(
                f"the state of the clients of this rank, up to {format_bytes(length)}, cannot be kept in {where}: "
                f"{error.strerror}; {cure}, or use more nodes"
            ) from error
        self.bytes = flat[:length].view(rows, row_bytes)

    def reserve(self, rows: np.ndarray, start: int, end: int) -> None:
        """Allocate bytes [start, end) of the given rows on disk: writing to a mapped file on a full disk is fatal.

        Raises:
            RunError: the disk is full.
        """
        if self._file is None or start == end:
            return
        for row in rows.tolist():
            try:
                os.posix_fallocate(self._file, row * self.bytes.shape[1] + start, end - start)
            except OSError as error:
                raise RunError(
                    f"{error.strerror} while the state of clients was written in {self._folder}, because of "
                    f"runtime.state = 'disk'; {atomic.remedy(error)}, or name another folder as runtime.scratch, and "
                    "resume the run"
                ) from error


@dataclass(frozen=True)
class CohortRows:
    """State of clients of one cohort.

    Attributes:
        clients: [m] ascending ids.
        rows: tree of [m, ...], views of `storage`; valid only where `changed`.
        storage: the bytes of all rows, client by client.
        changed: by path, [m] bool, whether the client's row was written.
        offsets: by path, where the leaf begins and ends in a row of `storage`.
        common: by path, the row [1, ...] of all unchanged clients; zeros if missing.
    """

    clients: np.ndarray
    rows: Tree
    storage: Storage
    changed: dict[str, np.ndarray]
    offsets: dict[str, tuple[int, int]]
    common: dict[str, Tensor] = field(default_factory=dict)

    def get(self, clients: np.ndarray, without: Collection[str] = ()) -> Tree:
        """A copy of the rows [c, ...] of the given clients, without the named parts."""
        return self._copy({name: value for name, value in self.rows.items() if name not in without}, clients)

    def part(self, clients: np.ndarray, name: str) -> Tree:
        """A copy of the named part of the rows [c, ...] of the given clients."""
        return tree.part(self._copy({name: self.rows[name]}, clients), name)

    def leaf(self, clients: np.ndarray, path: str) -> Tensor:
        """A copy of the rows [c, ...] of one leaf of the given clients."""
        return self._leaf(path, tree.at(self.rows, path), self._positions(clients))

    def put(self, clients: np.ndarray, state: Tree) -> None:
        """Overwrite the rows of the given clients for the leaves [c, ...] in `state`."""
        positions, leaves, state_leaves = (
            self._positions(clients),
            dict(tree.leaves(self.rows)),
            dict(tree.leaves(state)),
        )
        if not state_leaves:
            return
        is_new = ~np.all([self.changed[path][positions] for path in state_leaves], axis=0)
        starts, ends = zip(*(self.offsets[path] for path in state_leaves), strict=True)
        self.storage.reserve(positions[is_new], min(starts), max(ends))
        for path, leaf in state_leaves.items():
            self.changed[path][positions] = True
            leaves[path].index_copy_(0, torch.from_numpy(positions), leaf)

    def set_initial(self, clients: np.ndarray, path: str, row: Tensor) -> None:
        """Set the same initial row [1, ...] of a leaf for clients; it becomes the common row if there is none yet."""
        common = self.common.get(path)
        if common is None and not self.changed[path].any():
            self.common[path] = row.clone()
        elif common is None or not _has_same_bits(common, row):
            self.put(clients, tree.unflatten({path: row.expand(len(clients), *row.shape[1:])}))

    def compact(self, clients: np.ndarray) -> Tree:
        """As `get`, but where no client has changed a leaf, its rows are one expanded row."""
        positions, rows = self._positions(clients), dict[str, Tensor]()
        for path, leaf in tree.leaves(self.rows):
            if self.changed[path][positions].any():
                rows[path] = self._leaf(path, leaf, positions)
            else:
                rows[path] = self._common(path, leaf).expand(len(clients), *leaf.shape[1:])
        return tree.unflatten(rows)

    def _copy(self, named: Tree, clients: np.ndarray) -> Tree:
        positions = self._positions(clients)
        leaves = iter([self._leaf(path, leaf, positions) for path, leaf in tree.leaves(named)])
        return tree.map(lambda _: next(leaves), named)

    def _positions(self, clients: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.clients, clients)

    def _common(self, path: str, leaf: Tensor) -> Tensor:
        return self.common[path] if path in self.common else leaf.new_zeros(1, *leaf.shape[1:])

    def _leaf(self, path: str, leaf: Tensor, positions: np.ndarray) -> Tensor:
        own = self.changed[path][positions]
        if own.all():
            return leaf.index_select(0, torch.from_numpy(positions))
        rows = self._common(path, leaf).repeat(len(positions), *[1] * (leaf.ndim - 1))
        if own.any():
            rows[torch.from_numpy(own)] = leaf.index_select(0, torch.from_numpy(positions[own]))
        return rows


def allocate_rows(clients: np.ndarray, template: Tree, folder: Path | None = None) -> CohortRows:
    """Unfilled rows for clients whose state has the shapes of `template`; see `Storage`."""
    leaves, offsets, end = dict(tree.leaves(template)), dict[str, tuple[int, int]](), 0
    for path, leaf in leaves.items():
        offsets[path] = end, end + leaf.nbytes
        end = -(-offsets[path][1] // _ALIGNMENT) * _ALIGNMENT
    storage = Storage(len(clients), max(end, _ALIGNMENT), folder)
    rows = (
        storage.bytes[:, slice(*offsets[path])].view(leaf.dtype).view(len(clients), *leaf.shape)
        for path, leaf in leaves.items()
    )
    changed = {path: np.zeros(len(clients), bool) for path in leaves}
    return CohortRows(clients, tree.map(lambda _: next(rows), template), storage, changed, offsets)


def _has_same_bits(row: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (row, other)))


def choose_state_folder(runtime: RuntimeConfig, run: Path) -> Path | None:
    """The folder for the file with the clients' state; None if it is kept in memory."""
    if runtime.state == "memory":
        return None
    return run if runtime.scratch is None else expand_path(runtime.scratch)


def check_scratch(runtime: RuntimeConfig) -> None:
    """Raise `ConfigError` unless this machine supports `runtime.state` and can write to `runtime.scratch`."""
    if runtime.state == "disk" and not hasattr(os, "posix_fallocate"):
        raise ConfigError("runtime.state = 'disk' needs posix_fallocate, which this system has not; use 'memory'")
    if runtime.scratch is None:
        return
    named = f"runtime.scratch = {runtime.scratch!r}"
    folder = choose_state_folder(runtime, Path())
    if folder is None:
        raise ConfigError(f"{named} is for runtime.state = 'disk', which is 'memory'; set that, or leave scratch out")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written" if folder.is_dir() else "is no folder"
        raise ConfigError(f"{named}: {folder} {why} here; name one that every node has and this user may write to")


def _map_memory(file: int | None, length: int) -> mmap.mmap:
    if file is not None:
        os.truncate(file, length)
        return mmap.mmap(file, length)
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # one row would take 2 MiB
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


@dataclass(frozen=True)
class Population:
    """State of all clients that live on a rank."""

    cohorts: tuple[CohortRows, ...]  # by cohort, with no rows where none of its clients lives here
    cohort: np.ndarray  # [N] the cohort of each client

    def _rows(self, group: np.ndarray) -> CohortRows:
        return self.cohorts[int(self.cohort[group[0]])]

    def get(self, group: np.ndarray) -> Tree:
        """A copy of the algorithm's state [m, ...] of a group's clients."""
        return self._rows(group).get(group, without=(RECEIVED, ANSWERED, RESIDUAL, OPTIMIZER))

    def to_train(self, group: np.ndarray) -> Tree:
        """As `get`, with the optimizer state if it is kept between rounds."""
        return self._rows(group).get(group, without=(RECEIVED, ANSWERED, RESIDUAL))

    def answers(self, group: np.ndarray) -> Messages:
        """The kept messages [m, ...] that a group's clients received last; `{}` if none are kept."""
        return self._messages(group, ANSWERED)

    def put(self, group: np.ndarray, state: Tree) -> None:
        self._rows(group).put(group, state)

    def restore(self, clients: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Restore clients of one cohort from a checkpoint's arrays [m, ...] by path; see `CohortRows.compact`."""
        rows = self._rows(clients)
        common = {path: array for path, array in arrays.items() if array.strides[0] == 0}
        for path, array in common.items():
            rows.set_initial(clients, path, torch.tensor(array[:1]))
        rows.put(clients, tree_from_arrays({path: array for path, array in arrays.items() if path not in common}))

    def keep_reply(self, groups: Sequence[np.ndarray], reply: Reply) -> None:
        """Store the reply with the clients, if absent clients are tested with the reply that they received last."""
        groups = [group for group in groups if RECEIVED in self._rows(group).rows]
        reply = reply.on(HOST) if groups else reply
        for group in groups:
            names = tree.part(self._rows(group).rows, RECEIVED)
            self.put(group, {RECEIVED: {**reply.for_clients(group, names)}})

    def received(self, group: np.ndarray, reply: Reply, names: tuple[str, ...]) -> Messages:
        """The messages [m, ...] that a group's clients are tested with: the stored ones, or those named of `reply`."""
        return self._messages(group, RECEIVED) or reply.for_clients(group, names)

    def _messages(self, group: np.ndarray, name: str) -> Messages:
        rows = self._rows(group)
        return rows.part(group, name) if name in rows.rows else {}  # type: ignore[return-value]

    def leaf(self, path: str, clients: np.ndarray) -> torch.Tensor:
        """A copy of one leaf [m, ...] of clients that live here, ascending; the leaf must exist in all cohorts."""
        like = tree.at(self.cohorts[0].rows, path)
        leaf = like.new_empty(len(clients), *like.shape[1:])
        for rows in self.cohorts:
            members = np.isin(clients, rows.clients)
            leaf[torch.from_numpy(members)] = rows.leaf(clients[members], path)
        return leaf

    def kept(self, name: str, like: Tree, clients: np.ndarray) -> Tree:
        """A copy of a named part [m, ...] of the state, with the leaves of the template `like`; see `Homes`."""
        return tree.unflatten({path: self.leaf(f"{name}/{path}", clients) for path, _ in tree.leaves(like)})


def client_templates(
    algorithm: Algorithm,
    tasks: Sequence[Task],
    cohort: np.ndarray,
    kept_reply: tuple[str, ...],
    uplink: UplinkConfig,
) -> tuple[Tree, ...]:
    """Returns, per cohort, a template of the state that a client keeps between rounds.

    Args:
        cohort: [N] the cohort of each client.
        kept_reply: names of the received messages that a client is tested with while it is absent.
        uplink: transforms of the messages up, which may keep a residual.
    """
    templates = []
    for number, task in enumerate(tasks):
        host = task.replace(device=HOST)
        template = tree.like(initial_client(algorithm, host, int(np.flatnonzero(cohort == number)[0])))
        if task.training.keep_optimizer:
            trainings = algorithm.trainings(host).items()
            states: Tree = {name: init_optimizer_state(task.training, trained) for name, trained in trainings}
            template[OPTIMIZER] = tree.like(states)
        if answers := answer_templates(algorithm, host):
            template[ANSWERED] = answers
        if kept_reply:
            kinds = algorithm.downlink(host)
            template[RECEIVED] = {name: client_template(kinds[name], task.num_classes) for name in kept_reply}
        templates.append({**template, **residual_like(uplink, algorithm.uplink(host))})
    return tuple(templates)


def find_row_types(templates: Sequence[Tree]) -> dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]]:
    """Returns, per cohort name of checkpoints, the (shape, dtype) of each path of a client's state."""
    return {
        cohort_name(number): {
            path: (tuple(leaf.shape), to_numpy(leaf.new_empty((), device="cpu")).dtype)
            for path, leaf in tree.leaves(template)
        }
        for number, template in enumerate(templates)
    }


def allocate(
    cohort: np.ndarray, hosted: np.ndarray, templates: Sequence[Tree], folder: Path | None = None
) -> Population:
    """Returns the population of a rank, with unfilled rows.

    Args:
        hosted: ascending ids of the clients that live here.
        templates: one per cohort, the state of a client.
        folder: where to create the file with the rows; None for memory.
    """
    cohorts = (
        allocate_rows(hosted[cohort[hosted] == number], template, folder) for number, template in enumerate(templates)
    )
    return Population(tuple(cohorts), cohort)


def initialise(population: Population, algorithm: Algorithm, tasks: Sequence[Task]) -> None:
    for rows, task in zip(population.cohorts, tasks, strict=True):
        if len(rows.clients):
            _initialise_rows(rows, algorithm, task.replace(device=HOST))


def _initialise_rows(rows: CohortRows, algorithm: Algorithm, task: Task) -> None:
    """Fill the rows of one cohort; a state that does not depend on the client is computed once."""
    per_client = depends_on_client(algorithm, task)
    with calling(algorithm, "init_client", 0):
        for position in range(len(rows.clients) if per_client else 1):
            client = int(rows.clients[position])
            state, answers = initial_client(algorithm, task, client), initial_received(algorithm, task, client)
            clients = rows.clients[position : position + 1] if per_client else rows.clients
            for path, leaf in tree.leaves({**state, **({ANSWERED: {**answers}} if answers else {})}):
                rows.set_initial(clients, path, leaf.unsqueeze(0))


def tree_from_arrays(flat: dict[str, np.ndarray]) -> Tree:
    return tree.unflatten({path: torch.from_numpy(np.asarray(array, order="C")) for path, array in flat.items()})


def stored_messages(algorithm: Algorithm, task: Task, templates: Sequence[Tree]) -> list[str]:
    """Returns the names of the messages that round files store: parts of personal models that no client keeps."""
    return [] if RECEIVED in templates[0] else sorted(personal.messages(algorithm.personal(task)))
