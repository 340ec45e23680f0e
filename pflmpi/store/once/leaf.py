"""A leaf of which all rows are the same, in a shard.

    /<cohort>/once/<path>       [1, ...] the row
    /<cohort>/several/<path>    [b, ...] virtual: b times that row
    /<cohort>/rows/<path>       [m, ...] virtual, in pieces of b rows: what every reader finds

HDF5 has no mapping of many rows to one, and needs one for each piece; with b the root of m they are few on both levels.
"""

import math

import numpy as np

from pflmpi.store import checked_hdf5
from pflmpi.store.hdf5 import Group, Identifier, h5py, untimed, with_groups, write_attribute

_WORTH = 1 << 20  # bytes; of fewer, every row is stored


def is_repeated(array: np.ndarray) -> bool:
    """Whether all rows of an array [m, ...] are one in memory, as `np.broadcast_to` makes them."""
    return len(array) > 1 and array.strides[0] == 0 and array.size > 0


def put(cohort: Group, path: str, array: np.ndarray, checksum: int | None) -> Identifier | None:
    """Store a leaf [m, ...], once if it is repeated, with a known CRC-32, and large: None then, else its identifier."""
    if checksum is None or not is_repeated(array) or array.nbytes < _WORTH:
        return checked_hdf5.put(cohort, f"rows/{path}", array, checksum)
    rows, row = len(array), np.ascontiguousarray(array[:1])
    checked_hdf5.put(cohort, f"once/{path}", row)
    several = math.isqrt(rows - 1) + 1
    _show(cohort, f"once/{path}", f"several/{path}", row, 1, several)
    shown = _show(cohort, f"several/{path}", f"rows/{path}", row, several, rows)
    write_attribute(shown, "crc32", np.uint32(checksum))
    return None


def get(cohort: Group, path: str, rows: int) -> np.ndarray | None:
    """So many rows of a leaf that is stored once, as one in memory; None for any other leaf.

    Raises:
        CheckpointError: it is damaged.
    """
    if f"once/{path}" not in cohort:
        return None
    row = checked_hdf5.get(cohort, f"once/{path}")
    return np.broadcast_to(row, (rows, *row.shape[1:]))


def _show(cohort: Group, source: str, path: str, row: np.ndarray, piece: int, rows: int) -> Identifier:
    """Create a virtual dataset of so many rows, of pieces of a source that has `piece` rows; its identifier."""
    shape = row.shape[1:]
    rest, ones = (0,) * len(shape), (1,) * (1 + len(shape))
    whole, part = h5py.h5s.create_simple((rows, *shape)), h5py.h5s.create_simple((piece, *shape))
    creation = untimed(h5py.h5p.DATASET_CREATE)
    for start in range(0, rows, piece):
        block = (min(piece, rows - start), *shape)
        whole.select_hyperslab((start, *rest), ones, block=block)
        part.select_hyperslab((0, *rest), ones, block=block)
        creation.set_virtual(whole, b".", f"{cohort.name}/{source}".encode(), part)
    whole.select_all()
    kind = h5py.h5t.py_create(row.dtype, logical=True)
    return h5py.h5d.create(cohort.id, path.encode(), kind, whole, creation, lcpl=with_groups())
