"""A leaf of which all rows are the same, in a shard.

    /<cohort>/once/<path>       [1, ...] the row
    /<cohort>/several/<path>    [b, ...] virtual: b times that row
    /<cohort>/rows/<path>       [m, ...] virtual, in pieces of b rows: what every reader finds

HDF5 has no mapping of many rows to one, and needs one for each piece; with b the root of m they are few on both levels.
"""

import math

import numpy as np

from pflmpi.store import checked_hdf5
from pflmpi.store.checked_hdf5 import Writing
from pflmpi.store.checksums import Part
from pflmpi.store.hdf5 import Group, h5py, untimed, with_groups

_WORTH = 1 << 20  # bytes; of fewer, every row is stored


def is_repeated(array: np.ndarray) -> bool:
    """Whether all rows of an array [m, ...] are one in memory, as `np.broadcast_to` makes them."""
    return len(array) > 1 and array.strides[0] == 0 and array.size > 0


def put(writing: Writing, cohort: str, path: str, array: np.ndarray, checksum: int | None) -> None:
    """Store a leaf [m, ...] of a cohort; once if it is repeated, with a known CRC-32, and large."""
    if checksum is None or not is_repeated(array) or array.nbytes < _WORTH:
        dataset = writing.put(f"{cohort}/rows/{path}", array, checksum)
        if checksum is not None and array.nbytes:
            writing.parts.append(Part(dataset.get_offset(), array.nbytes, checksum))
        return
    rows, row = len(array), np.ascontiguousarray(array[:1])
    writing.put(f"{cohort}/once/{path}", row)
    several = math.isqrt(rows - 1) + 1
    group = writing.file[cohort]
    _show(group, f"once/{path}", f"several/{path}", row, 1, several)
    _show(group, f"several/{path}", f"rows/{path}", row, several, rows)
    writing.describe(f"{cohort}/rows/{path}", checksum)


def get(cohort: Group, path: str, rows: int) -> np.ndarray | None:
    """So many rows of a leaf that is stored once, as one in memory; None for any other leaf.

    Raises:
        CheckpointError: it is damaged.
    """
    if f"once/{path}" not in cohort:
        return None
    row = checked_hdf5.get(cohort, f"once/{path}")
    return np.broadcast_to(row, (rows, *row.shape[1:]))


def _show(cohort: Group, source: str, path: str, row: np.ndarray, piece: int, rows: int) -> None:
    """Create a virtual dataset of so many rows, of pieces of a source that has `piece` rows."""
    shape = row.shape[1:]
    rest, ones = (0,) * len(shape), (1,) * (1 + len(shape))
    whole, part = (h5py.h5s.create_simple((rows, *shape)), h5py.h5s.create_simple((piece, *shape)))
    creation = untimed(h5py.h5p.DATASET_CREATE)
    for start in range(0, rows, piece):
        block = (min(piece, rows - start), *shape)
        whole.select_hyperslab((start, *rest), ones, block=block)
        part.select_hyperslab((0, *rest), ones, block=block)
        creation.set_virtual(whole, b".", f"{cohort.name}/{source}".encode(), part)
    whole.select_all()
    kind = h5py.h5t.py_create(row.dtype, logical=True)
    h5py.h5d.create(cohort.id, path.encode(), kind, whole, creation, lcpl=with_groups())
