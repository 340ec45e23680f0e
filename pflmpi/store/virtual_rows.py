"""The state of the clients in a round file: HDF5 virtual datasets, which show the rows that lie in the shards.

Where a shard is missing, HDF5 shows a fill value without a word. So that it cannot be mistaken for a value, it is NaN,
the least integer (the largest of unsigned ones), or for booleans `MISSING`, a third value of their enumeration beside
`FALSE` and `TRUE`; h5py reads such an enumeration as int8: 0, 1 and -1. `about` says it of each array, as `missing`.
"""

from typing import Any

import numpy as np

from pflmpi.contained_hdf5 import refuse_other_sources
from pflmpi.store.checked_hdf5 import Description, HDF5Writer
from pflmpi.store.hdf5 import Dataset, file_type, h5py, selected_rows, simple_space, untimed, with_groups
from pflmpi.store.layout import Layout
from pflmpi.store.names import SHARD_NAME
from pflmpi.store.shard import consecutive

Space = Any  # of h5py
_BOOLEANS = {"FALSE": 0, "TRUE": 1, "MISSING": -1}


class VirtualRows:
    """Where the rows of a cohort lie.

    Attributes:
        members: number of its clients.
    """

    def __init__(self, cohort: str, layout: Layout) -> None:
        members = layout.cohorts[cohort]
        self.members = len(members)
        self._shards = [
            (name.encode(), _runs(np.searchsorted(members, clients)), _runs(layout.row[clients]))
            for name, clients in layout.shards(cohort)
        ]
        self._mappings: dict[tuple[int, ...], list[tuple[bytes, Space, Space]]] = {}

    def mappings(self, shape: tuple[int, ...]) -> list[tuple[bytes, Space, Space]]:
        """For each shard with rows its name, and these rows selected in a leaf of the cohort and in that of the shard.

        One mapping per shard: a cohort's rows in a shard are in client order, so a union of row ranges on each side
        pairs them correctly, however they are cut, and a thousand scattered clients do not become a thousand mappings.
        """
        if shape not in self._mappings:
            self._mappings[shape] = [
                (name, selected_rows(self.members, positions, shape), selected_rows(sum(rows[-1]), rows, shape))
                for name, positions, rows in self._shards
            ]
        return self._mappings[shape]


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """The first of ascending rows that follow one another, and their number."""
    return [(int(rows[run.start]), run.stop - run.start) for run in consecutive(rows)]


def write_virtual_rows(
    writer: HDF5Writer,
    path: str,
    source_path: str,
    template: tuple[tuple[int, ...], np.dtype],
    rows: VirtualRows,
    description: Description,
) -> None:
    """Create the virtual dataset [m, ...] of one leaf of a cohort, which is `source_path` in the shards.

    Args:
        template: shape and dtype of a row.
    """
    shape, dtype = template
    if 0 in shape:  # nothing to map
        writer.write_dataset(path, np.empty((rows.members, *shape), dtype), description)
        return
    creation = untimed(h5py.h5p.DATASET_CREATE)
    for name, whole, source in rows.mappings(shape):
        creation.set_virtual(whole, name, source_path.encode(), source)
    stored, (missing, called) = _stored_dtype(dtype), _missing(dtype)
    creation.set_fill_value(np.array(missing, stored))
    kind, space = file_type(stored), simple_space((rows.members, *shape))
    dataset = h5py.h5d.create(writer.file.id, path.encode(), kind, space, creation, lcpl=with_groups())
    writer.about["arrays"].setdefault(path, {})["missing"] = called
    writer.describe(path, None, description)
    writer.name_axes(dataset, (rows.members, *shape), description.axes or ())


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
