"""The state of some clients: one row of each leaf for every client, where those that have not changed share one.

Rows lie in memory or in a mapped file, and take up nothing but what is written.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pflmpi import atomic, tree
from pflmpi.errors import ConfigError, RunError
from pflmpi.machine import expanded
from pflmpi.messages.packing import to_numpy
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.text import size
from pflmpi.tree import Tree

_ALIGNED = 64  # bytes


class Storage:
    """Bytes that are zero until they are written.

    A file has no name, so that it is gone when the process is, however that ends.

    Attributes:
        bytes: [rows, row_bytes] uint8.

    Args:
        folder: of the file; None for memory.

    Raises:
        ConfigError: there cannot be as much.
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
            flat = torch.frombuffer(_mapped(self._file, max(length, 1)), dtype=torch.uint8)
        except OSError as error:
            where, cure = "memory", "set runtime.state=disk"
            if folder is not None:
                where, cure = str(folder), "name another folder as runtime.scratch"
            raise ConfigError(
                f"the state of the clients of this rank, up to {size(length)}, cannot be kept in {where}: "
                f"{error.strerror}; {cure}, or use more nodes"
            ) from error
        self.bytes = flat[:length].view(rows, row_bytes)

    def reserve(self, rows: np.ndarray, start: int, end: int) -> None:
        """Make sure that these bytes of rows have room: a process ends that writes to a mapped file on a full disk.

        Raises:
            RunError: they have not.
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
class Rows:
    """State of some clients of one cohort.

    Attributes:
        clients: [m] ascending ids.
        rows: tree of [m, ...]; a row takes no room before it is written.
        storage: where the rows lie, one client's after another's.
        changed: by path, [m] bool, the clients whose rows were written.
        places: by path, where in a row of `storage` the leaf begins and ends.
        common: by path, the row [1, ...] that all other clients have; zeros where there is none.
    """

    clients: np.ndarray
    rows: Tree
    storage: Storage
    changed: dict[str, np.ndarray]
    places: dict[str, tuple[int, int]]
    common: dict[str, Tensor] = field(default_factory=dict)

    def get(self, clients: np.ndarray, without: Collection[str] = ()) -> Tree:
        """A copy of the rows [c, ...] of the given clients, but for the named parts."""
        return self._copy({name: value for name, value in self.rows.items() if name not in without}, clients)

    def part(self, clients: np.ndarray, name: str) -> Tree:
        """A copy of the named part of the rows [c, ...] of the given clients."""
        return tree.part(self._copy({name: self.rows[name]}, clients), name)

    def leaf(self, clients: np.ndarray, path: str) -> Tensor:
        """A copy of the rows [c, ...] of one leaf of the given clients."""
        return self._leaf(path, tree.at(self.rows, path), self._positions(clients))

    def put(self, clients: np.ndarray, state: Tree) -> None:
        """Overwrite the rows of the given clients, of the leaves that `state` has, [c, ...]."""
        positions, leaves, new = self._positions(clients), dict(tree.leaves(self.rows)), dict(tree.leaves(state))
        if not new:
            return
        first = ~np.all([self.changed[path][positions] for path in new], axis=0)
        starts, ends = zip(*(self.places[path] for path in new), strict=True)
        self.storage.reserve(positions[first], min(starts), max(ends))
        for path, rows in new.items():
            self.changed[path][positions] = True
            leaves[path].index_copy_(0, torch.from_numpy(positions), rows)

    def begin(self, clients: np.ndarray, path: str, row: Tensor) -> None:
        """Give clients that have not changed the same row [1, ...] of a leaf: in common, where no other one is."""
        common = self.common.get(path)
        if common is None and not self.changed[path].any():
            self.common[path] = row.clone()
        elif common is None or not _same_bits(common, row):
            self.put(clients, tree.unflatten({path: row.expand(len(clients), *row.shape[1:])}))

    def flat(self, clients: np.ndarray) -> dict[str, np.ndarray]:
        """A copy of the rows of the given clients by path; one that they all have in common is one in memory."""
        positions = self._positions(clients)
        arrays = {}
        for path, leaf in tree.leaves(self.rows):
            if self.changed[path][positions].any():
                arrays[path] = to_numpy(self._leaf(path, leaf, positions))
            else:
                row = to_numpy(self._common(path, leaf))
                arrays[path] = np.broadcast_to(row, (len(clients), *row.shape[1:]))
        return arrays

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


def empty_rows(clients: np.ndarray, template: Tree, folder: Path | None = None) -> Rows:
    """Rows not yet filled, for clients that each keep what the template says; see `Storage`."""
    leaves, places, end = dict(tree.leaves(template)), dict[str, tuple[int, int]](), 0
    for path, leaf in leaves.items():
        places[path] = end, end + leaf.nbytes
        end = -(-places[path][1] // _ALIGNED) * _ALIGNED
    storage = Storage(len(clients), max(end, _ALIGNED), folder)
    rows = (
        storage.bytes[:, slice(*places[path])].view(leaf.dtype).view(len(clients), *leaf.shape)
        for path, leaf in leaves.items()
    )
    changed = {path: np.zeros(len(clients), bool) for path in leaves}
    return Rows(clients, tree.map(lambda _: next(rows), template), storage, changed, places)


def _same_bits(row: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (row, other)))


def folder_of(runtime: RuntimeConfig, run: Path) -> Path | None:
    """The folder of the file that holds the state of the clients of a run; None where memory does."""
    if runtime.state == "memory":
        return None
    return run if runtime.scratch is None else expanded(runtime.scratch)


def check_scratch(runtime: RuntimeConfig) -> None:
    """Raise `ConfigError` unless `runtime.state` and `runtime.scratch` can be had here."""
    if runtime.state == "disk" and not hasattr(os, "posix_fallocate"):
        raise ConfigError("runtime.state = 'disk' needs posix_fallocate, which this system has not; use 'memory'")
    if runtime.scratch is None:
        return
    named = f"runtime.scratch = {runtime.scratch!r}"
    folder = folder_of(runtime, Path())
    if folder is None:
        raise ConfigError(f"{named} is for runtime.state = 'disk', which is 'memory'; set that, or leave scratch out")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written" if folder.is_dir() else "is no folder"
        raise ConfigError(f"{named}: {folder} {why} here; name one that every node has and this user may write to")


def _mapped(file: int | None, length: int) -> mmap.mmap:
    if file is not None:
        os.truncate(file, length)
        return mmap.mmap(file, length)
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # one row would take 2 MiB
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
