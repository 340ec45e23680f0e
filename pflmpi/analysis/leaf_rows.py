"""State of the clients as arrays that are read when they are indexed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.registry import unknown
from pflmpi.store.layout import Layout
from pflmpi.store.run_folder import read_leaf


@dataclass(frozen=True, eq=False)
class LeafRows:
    """One leaf of the clients of a cohort, [m, ...] in the order of `clients`; nothing is read until it is indexed.

    `rows[3]`, `rows[[0, 4]]`, `rows[2:5, 0]` read the rows of these clients alone, `np.asarray(rows)` reads all. What
    is read is checked against its checksum where a file's rows are all read; `Checkpoint.verify` checks every byte.

    Attributes:
        clients: [m] ascending ids.
        shape: (m, ...).
        dtype: of the elements.
    """

    clients: np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype
    _run: Path
    _layout: Layout
    _cohort: str
    _leaf: str

    @property
    def ndim(self) -> int:
        """The number of axes, with that of the clients."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows together."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[position] for position in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows on disk cannot be had without a copy")
        everything = self._read(np.arange(len(self)))
        return everything if dtype is None else everything.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> Any:
        """The same as NumPy for the whole array; only the rows that the first index names are read."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, list):
            first = np.array(first) if first else np.empty(0, np.int64)
        if not _names_clients(first):
            return np.asarray(self)[index]  # an ellipsis, a new axis, a mask of several axes
        wanted = np.arange(len(self))[first]
        needed, positions = np.unique(wanted, return_inverse=True)
        rows = self._read(needed)
        if isinstance(first, slice):
            return (rows if np.array_equal(needed, wanted) else rows[positions])[(slice(None), *rest)]
        return rows[(positions.reshape(wanted.shape)[()], *rest)]

    def __repr__(self) -> str:
        return f"<{self._leaf}: {self.dtype} {list(self.shape)}, not read>"

    def _read(self, positions: np.ndarray) -> np.ndarray:
        like = np.empty(self.shape[1:], self.dtype)
        return read_leaf(self._run, self._layout, self._cohort, self._leaf, self.clients[positions], like)


def _names_clients(first: object) -> bool:
    """Whether an index is of the first axis alone."""
    if isinstance(first, np.ndarray):
        return first.dtype.kind in "iu" or (first.dtype.kind == "b" and first.ndim == 1)
    return isinstance(first, int | np.integer | slice) and not isinstance(first, bool | np.bool_)


class Leaves(Mapping[str, LeafRows]):
    """The leaves of the clients by path, such as "model/head/weight"; "model/head.weight" is the same one.

    Where clients have unlike models, each cohort's leaves are apart, as "cohort0/model/head/weight".
    """

    def __init__(self, leaves: Mapping[str, LeafRows]) -> None:
        self._leaves = dict(sorted(leaves.items()))

    def __getitem__(self, path: str) -> LeafRows:
        name = path if path in self._leaves else path.replace(".", "/")
        if name not in self._leaves:
            raise KeyError(unknown("leaf", path, list(self._leaves)))
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        return "\n".join(f"{path}: {rows.dtype} {list(rows.shape)}" for path, rows in self._leaves.items())
