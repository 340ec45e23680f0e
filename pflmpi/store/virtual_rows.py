"""The state of the clients in a round file: HDF5 virtual datasets, which show the rows that lie in the shards.

Where a shard is missing, HDF5 shows a fill value without a word. So that it cannot be mistaken for a value, it is NaN,
the least integer (the largest of unsigned ones), or for booleans `MISSING`, a third value of their enumeration beside
`FALSE` and `TRUE`; h5py reads such an enumeration as int8: 0, 1 and -1. `about` says it of each array, as `missing`.
"""

from typing import NamedTuple

import numpy as np

from pflmpi.contained_hdf5 import refuse_other_sources
from pflmpi.store.checked_hdf5 import Writing
from pflmpi.store.hdf5 import Dataset, h5py, untimed, with_groups
from pflmpi.store.layout import Layout
from pflmpi.store.names import SHARD_NAME
from pflmpi.store.shard import consecutive

_BOOLEANS = {"FALSE": 0, "TRUE": 1, "MISSING": -1}


class VirtualRows(NamedTuple):
    """Where the rows of a cohort lie.

    Attributes:
        members: number of its clients.
        parts: for each shard with rows of it the name, how many rows it has at least, and the ranges of rows, those of
            the cohort and those of the shard that hold them: (first row, number).
    """

    members: int
    parts: list[tuple[str, int, list[tuple[int, int]], list[tuple[int, int]]]]

    @classmethod
    def from_layout(cls, cohort: str, layout: Layout) -> "VirtualRows":
        """The rows of a cohort."""
        members, parts = layout.cohorts[cohort], []
        for name, clients in layout.shards(cohort):
            positions, rows = np.searchsorted(members, clients), layout.row[clients]
            parts.append((name, int(rows[-1]) + 1, _ranges(positions), _ranges(rows)))
        return cls(len(members), parts)


def _ranges(rows: np.ndarray) -> list[tuple[int, int]]:
    """First row and number of each range of ascending rows [m]."""
    return [(int(rows[run.start]), run.stop - run.start) for run in consecutive(rows)]


def write_virtual_rows(
    writing: Writing, path: str, source_path: str, shape: tuple[int, ...], dtype: np.dtype, rows: VirtualRows
) -> None:
    """Create the virtual dataset [m, ...] of one leaf of a cohort, which is `source_path` in the shards.

    One mapping per shard: a cohort's rows in a shard are in client order, so a union of row ranges on each side pairs
    them correctly, however they are cut, and a thousand scattered clients do not become a thousand mappings.
    """
    if 0 in shape:  # nothing to map
        writing.write_dataset(path, np.empty((rows.members, *shape), dtype))
        return
    rest, ones = (0,) * len(shape), (1,) * (1 + len(shape))
    whole = h5py.h5s.create_simple((rows.members, *shape))
    creation = untimed(h5py.h5p.DATASET_CREATE)
    for name, extent, *both_ranges in rows.parts:
        source = h5py.h5s.create_simple((extent, *shape))  # any that includes the last row: only the selection matters
        for space, ranges in zip((whole, source), both_ranges, strict=True):
            space.select_none()
            for first, number in ranges:
                space.select_hyperslab((first, *rest), ones, block=(number, *shape), op=h5py.h5s.SELECT_OR)
        creation.set_virtual(whole, name.encode(), source_path.encode(), source)
    stored, (missing, called) = _stored_dtype(dtype), _missing(dtype)
    creation.set_fill_value(np.array(missing, stored))
    kind = h5py.h5t.py_create(stored, logical=True)
    whole.select_all()
    dataset = h5py.h5d.create(writing.file.id, path.encode(), kind, whole, creation, lcpl=with_groups())
    writing.about["arrays"].setdefault(path, {})["missing"] = called
    writing.name_axes(dataset, (rows.members, *shape), ("client",))


def kind_of(dataset: Dataset) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of what a client keeps, of a virtual dataset.

    Raises:
        ValueError: it shows rows of anything but shards.
    """
    refuse_other_sources(dataset, SHARD_NAME)
    return tuple(dataset.shape[1:]), dtype_of(dataset)


def dtype_of(dataset: Dataset) -> np.dtype:
    """What the clients keep, of a virtual dataset."""
    return np.dtype(bool) if h5py.check_enum_dtype(dataset.dtype) == _BOOLEANS else np.dtype(dataset.dtype)


def _stored_dtype(dtype: np.dtype) -> np.dtype:
    stored: np.dtype = h5py.enum_dtype(_BOOLEANS, "i1") if dtype.kind == "b" else dtype
    return stored


def _missing(dtype: np.dtype) -> tuple[int | float, str]:
    """What HDF5 shows for a missing shard, and its name."""
    if dtype.kind == "b":
        return _BOOLEANS["MISSING"], "MISSING"
    if dtype.kind in "iu":
        value = int(np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max)
        return value, str(value)
    return np.nan, "NaN"
