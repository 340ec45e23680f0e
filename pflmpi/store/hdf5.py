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
    kind, space = file_type(array.dtype), simple_space(array.shape)
    dataset = h5py.h5d.create(where, path.encode(), kind, space, _untimed(h5py.h5p.DATASET_CREATE), lcpl=with_groups())
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array, kind)
    return dataset


def reserve_array(where: Identifier, path: str, array: np.ndarray) -> Identifier:
    """`write_array` without the values: they have their place in the file, where they can be written later."""
    kind, space = file_type(array.dtype), simple_space(array.shape)
    return h5py.h5d.create(where, path.encode(), kind, space, _reserved(), lcpl=with_groups())


def write_texts(where: Identifier, path: str, texts: Sequence[str]) -> Identifier:
    """Create a dataset of texts of any length; its identifier."""
    (kind, in_memory), creation = _text_kinds(), _untimed(h5py.h5p.DATASET_CREATE)
    dataset = h5py.h5d.create(where, path.encode(), kind, simple_space((len(texts),)), creation)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(texts, _TEXT), in_memory)
    return dataset


def write_group(where: Identifier, path: str) -> Group:
    """Create a group, with those on its path."""
    return h5py.Group(h5py.h5g.create(where, path.encode(), lcpl=with_groups(), gcpl=_untimed(h5py.h5p.GROUP_CREATE)))


def write_attribute(where: Identifier, name: str, value: str | int | float | np.generic) -> None:
    text = isinstance(value, str)
    stored = np.asarray(value, _TEXT if text else None)
    kind, in_memory = _text_kinds() if text else (file_type(stored.dtype),) * 2
    h5py.h5a.create(where, name.encode(), kind, simple_space(())).write(stored, in_memory)


def write_scale(file: Identifier, name: str, extent: int) -> Identifier:
    """Create a dimension scale without coordinates, as netCDF has them; its identifier."""
    creation = _untimed(h5py.h5p.DATASET_CREATE)
    scale = h5py.h5d.create(file, name.encode(), file_type(np.dtype("f4")), simple_space((extent,)), creation)
    h5py.h5ds.set_scale(scale, b"This is a netCDF dimension but not a netCDF variable.%10d" % extent)
    return scale


def reference(scale: Identifier) -> np.ndarray:
    """Reference to a dimension scale; see `name_axes`."""
    return np.array([h5py.h5r.create(scale, b".", h5py.h5r.OBJECT)], h5py.ref_dtype)


def name_axes(dataset: Identifier, scales: Sequence[np.ndarray]) -> None:
    """Name all axes of a dataset by a `reference` each; HDF5's own function also lists the datasets in the scales."""
    kind, in_memory = _references()
    by_axis = np.empty(len(scales), h5py.vlen_dtype(h5py.ref_dtype))
    for axis, scale in enumerate(scales):
        by_axis[axis] = scale
    h5py.h5a.create(dataset, b"DIMENSION_LIST", kind, simple_space(by_axis.shape)).write(by_axis, in_memory)


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


def file_type(dtype: np.dtype) -> Any:
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
def simple_space(shape: tuple[int, ...]) -> Any:
    """HDF5's space of an array."""
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


def selected_rows(extent: int, runs: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> Any:
    """The space of an array [extent, *shape], with runs of rows selected: the first of each, and how many."""
    space = h5py.h5s.create_simple((extent, *shape))
    space.select_none()
    for first, number in runs:
        space.select_hyperslab(
            (first, *[0] * len(shape)), (1, *[1] * len(shape)), block=(number, *shape), op=h5py.h5s.SELECT_OR
        )
    return space


def untimed(kind: Any) -> Any:
    """New properties of datasets or groups without times, so that equal content is equal bytes."""
    creation = h5py.h5p.create(kind)
    creation.set_obj_track_times(False)
    return creation


_untimed = cache(untimed)
