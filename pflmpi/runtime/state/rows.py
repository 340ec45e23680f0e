"""The state of some clients: one row of each leaf for every client, where those that have not changed share one."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.packing import to_numpy
from pflmpi.runtime.state.storage import Storage
from pflmpi.tree import Tree

_ALIGNED = 64  # bytes


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

    def one(self, clients: np.ndarray, path: str) -> Tensor:
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
        found = {}
        for path, leaf in tree.leaves(self.rows):
            if self.changed[path][positions].any():
                found[path] = to_numpy(self._leaf(path, leaf, positions))
            else:
                row = to_numpy(self._common(path, leaf))
                found[path] = np.broadcast_to(row, (len(clients), *row.shape[1:]))
        return found

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
        found = self._common(path, leaf).repeat(len(positions), *[1] * (leaf.ndim - 1))
        if own.any():
            found[torch.from_numpy(own)] = leaf.index_select(0, torch.from_numpy(positions[own]))
        return found


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


def _same_bits(one: Tensor, other: Tensor) -> bool:
    first, second = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)
