"""h5py, which has no type annotations, and quick ways to write with it: its own take three times as long.

The names below stand in for h5py's types. What is written is the same to the byte as by `create_dataset` and `attrs`.
"""

from functools import cache
from typing import Any

import h5py as _h5py
import numpy as np

h5py: Any = _h5py

File = Any
Group = Any
Dataset = Any
Identifier = Any  # of a file, group or dataset in h5py's low-level interface: `file.id`


def write_array(where: Identifier, path: str, array: np.ndarray) -> Identifier:
    """Create a dataset, with the groups on its path; its identifier."""
    space = h5py.h5s.create_simple(array.shape) if array.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    kind = h5py.h5t.py_create(array.dtype, logical=True)
    dataset = h5py.h5d.create(where, path.encode(), kind, space, _plain(), lcpl=with_groups())
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array)
    return dataset


def write_attribute(where: Identifier, name: str, value: str | int | float | np.generic) -> None:
    """Create an attribute."""
    dtype = h5py.string_dtype() if isinstance(value, str) else None
    stored = np.asarray(value, dtype)
    kind = h5py.h5t.py_create(stored.dtype, logical=True)
    h5py.h5a.create(where, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR)).write(stored)


@cache
def with_groups() -> Any:
    """The property by which links create the groups on their path."""
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    return links


@cache
def _plain() -> Any:
    """Datasets without times, so that equal content is equal bytes."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_obj_track_times(False)
    return creation
