"""The state of the clients in a round file: HDF5 virtual datasets of the rows that are stored in the shards.

Where a shard is missing, HDF5 silently shows the fill value. So that it cannot be mistaken for data, the fill value is
NaN, the smallest integer (the largest unsigned one), or for booleans `MISSING`, a third value of their enumeration
beside `FALSE` and `TRUE`; h5py reads such an enumeration as int8: 0, 1 and -1. `about` has it as `missing`.
"""

from typing import Any

import numpy as np

from pflmpi.contained_hdf5 import refuse_other_sources
from pflmpi.store.checked_hdf5 import Description, HDF5Writer
from pflmpi.store.hdf5 import Dataset, file_type, h5py, select_rows, simple_space, untimed, with_groups
from pflmpi.store.layout import Layout
from pflmpi.store.names import SHARD_NAME
from pflmpi.store.shard import split_consecutive

Space = Any  # of h5py
_BOOLEANS = {"FALSE": 0, "TRUE": 1, "MISSING": -1}


class VirtualRows:
    """Where the rows of a cohort are stored; leaves of equal shape share their mappings.

    Attributes:
        num_clients: of the cohort.
    """

    def __init__(self, cohort: str, layout: Layout) -> None:
        members = layout.cohorts[cohort]
        self.num_clients = len(members)
        self._shards = [
            (name.encode(), _runs(np.searchsorted(members, clients)), _runs(layout.row[clients]))
            for name, clients in layout.shards(cohort)
        ]
        self._mappings: dict[tuple[int, ...], list[tuple[bytes, Space, Space]]] = {}

    def mappings(self, shape: tuple[int, ...]) -> list[tuple[bytes, Space, Space]]:
        """Returns, for each shard, its name and its rows as selected in the cohort's leaf and in the shard's.

        One mapping per shard is enough: a cohort's rows in a shard are in client order, so a union of row ranges on
        each side pairs them correctly, and a thousand scattered clients do not become a thousand mappings.
        """
        if shape not in self._mappings:
            self._mappings[shape] = [
                (name, select_rows(self.num_clients, positions, shape), select_rows(sum(rows[-1]), rows, shape))
                for name, positions, rows in self._shards
            ]
        return self._mappings[shape]


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Returns the first row and the length of each run of consecutive rows."""
    return [(int(rows[run.start]), run.stop - run.start) for run in split_consecutive(rows)]


def write_virtual_rows(
    writer: HDF5Writer,
    path: str,
    source_path: str,
    template: tuple[tuple[int, ...], np.dtype],
    rows: VirtualRows,
    description: Description,
) -> None:
    """Create the virtual dataset [m, ...] of one leaf of a cohort, which is stored as `source_path` in the shards.

    Args:
        template: shape and dtype of a row.
    """
    shape, dtype = template
    if 0 in shape:  # nothing to map
        writer.write_dataset(path, np.empty((rows.num_clients, *shape), dtype), description)
        return
    creation = untimed(h5py.h5p.DATASET_CREATE)
    for name, whole, source in rows.mappings(shape):
        creation.set_virtual(whole, name, source_path.encode(), source)
    stored_dtype: np.dtype = h5py.enum_dtype(_BOOLEANS, "i1") if dtype.kind == "b" else dtype
    fill_value, fill_name = _fill_value(dtype)
    creation.set_fill_value(np.array(fill_value, stored_dtype))
    kind, space = file_type(stored_dtype), simple_space((rows.num_clients, *shape))
    dataset = h5py.h5d.create(writer.file.id, path.encode(), kind, space, creation, lcpl=with_groups())
    writer.about["arrays"].setdefault(path, {})["missing"] = fill_name
    writer.describe(path, None, description)
    writer.name_axes(dataset, (rows.num_clients, *shape), description.axes or ())


def read_kind(dataset: Dataset) -> tuple[tuple[int, ...], np.dtype]:
    """Returns shape and dtype of a client's row of a virtual dataset; `ValueError` if it shows anything but shards."""
    refuse_other_sources(dataset, SHARD_NAME)
    return tuple(dataset.shape[1:]), read_dtype(dataset)


def read_dtype(dataset: Dataset) -> np.dtype:
    """Returns the dtype of the clients' rows, which for booleans is not the dataset's."""
    return np.dtype(bool) if h5py.check_enum_dtype(dataset.dtype) == _BOOLEANS else np.dtype(dataset.dtype)


def _fill_value(dtype: np.dtype) -> tuple[int | float, str]:
    """Returns the value that HDF5 shows for a missing shard, and its name."""
    if dtype.kind == "b":
        return _BOOLEANS["MISSING"], "MISSING"
    if dtype.kind in "iu":
        value = int(np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max)
        return value, str(value)
    return np.nan, "NaN"
