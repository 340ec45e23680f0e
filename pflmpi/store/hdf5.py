"""h5py, which has no type annotations, and quick ways to write with it: its own take three times as long.

h5py keeps a list of all identifiers, so each costs some 10 us with the interpreter's lock: types, shapes and properties
are made once.

The names below stand in for h5py's types. What is written is the same to the byte as by `create_dataset` and `attrs`.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import h5py as _h5py
import numpy as np

h5py: Any = _h5py
_TEXT = h5py.string_dtype()

File = Any
Group = Any
Dataset = Any
Identifier = Any  # of a file, group or dataset in h5py's low-level interface: `file.id`


def write_array(where: Identifier, path: str, array: np.ndarray) -> Identifier:
    """Create a dataset, with the groups on its path; its identifier."""
    kind, space = _kind(array.dtype), _space(array.shape)
    dataset = h5py.h5d.create(where, path.encode(), kind, space, _untimed(h5py.h5p.DATASET_CREATE), lcpl=with_groups())
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array, kind)
    return dataset


def reserve_array(where: Identifier, path: str, array: np.ndarray) -> Identifier:
    """`write_array` without the values: they have their place in the file, where they can be written later."""
    kind, space = _kind(array.dtype), _space(array.shape)
    return h5py.h5d.create(where, path.encode(), kind, space, _reserved(), lcpl=with_groups())


def write_group(where: Identifier, path: str) -> Group:
    """Create a group, with those on its path."""
    return h5py.Group(h5py.h5g.create(where, path.encode(), lcpl=with_groups(), gcpl=_untimed(h5py.h5p.GROUP_CREATE)))


def write_attribute(where: Identifier, name: str, value: str | int | float | np.generic) -> None:
    """Create an attribute."""
    text = isinstance(value, str)
    stored = np.asarray(value, _TEXT if text else None)
    kind, in_memory = _text_kinds() if text else (_kind(stored.dtype),) * 2
    h5py.h5a.create(where, name.encode(), kind, _space(())).write(stored, in_memory)


def write_scale(file: Identifier, name: str, extent: int) -> Identifier:
    """Create a dimension scale without coordinates, as netCDF has them; its identifier."""
    creation = _untimed(h5py.h5p.DATASET_CREATE)
    scale = h5py.h5d.create(file, name.encode(), _kind(np.dtype("f4")), _space((extent,)), creation)
    h5py.h5ds.set_scale(scale, b"This is a netCDF dimension but not a netCDF variable.%10d" % extent)
    return scale


def references(scales: Sequence[Identifier]) -> np.ndarray:
    """References to dimension scales, one for each axis of a dataset; see `name_axes`."""
    by_axis = np.empty(len(scales), h5py.vlen_dtype(h5py.ref_dtype))
    for axis, scale in enumerate(scales):
        by_axis[axis] = np.array([h5py.h5r.create(scale, b".", h5py.h5r.OBJECT)], h5py.ref_dtype)
    return by_axis


def name_axes(dataset: Identifier, scales: np.ndarray) -> None:
    """Name all axes of a dataset by `references`; HDF5's own function also lists the datasets in the scales."""
    kind, in_memory = _references()
    h5py.h5a.create(dataset, b"DIMENSION_LIST", kind, _space(scales.shape)).write(scales, in_memory)


@cache
def _references() -> tuple[Any, Any]:
    """HDF5's type of the scales of one axis in a file, and in Python."""
    dtype = h5py.vlen_dtype(h5py.ref_dtype)
    return h5py.h5t.py_create(dtype, logical=True), h5py.h5t.py_create(dtype)


@cache
def with_groups() -> Any:
    """The property by which links create the groups on their path."""
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    return links


@cache
def _reserved() -> Any:
    creation = untimed(h5py.h5p.DATASET_CREATE)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return creation


def _kind(dtype: np.dtype) -> Any:
    """HDF5's type of an array; one with metadata compares equal to a plain one, and is made each time."""
    return h5py.h5t.py_create(dtype, logical=True) if dtype.metadata else _plain_kind(dtype)


@cache
def _plain_kind(dtype: np.dtype) -> Any:
    return h5py.h5t.py_create(dtype, logical=True)


@cache
def _text_kinds() -> tuple[Any, Any]:
    """HDF5's type of a text in a file, and of a string of Python."""
    return h5py.h5t.py_create(_TEXT, logical=True), h5py.h5t.py_create(_TEXT)


@lru_cache(maxsize=256)
def _space(shape: tuple[int, ...]) -> Any:
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


def untimed(kind: Any) -> Any:
    """New properties of datasets or groups without times, so that equal content is equal bytes."""
    creation = h5py.h5p.create(kind)
    creation.set_obj_track_times(False)
    return creation


_untimed = cache(untimed)
