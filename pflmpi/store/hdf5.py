"""Writing HDF5 by h5py's low-level interface, three times as fast as by `create_dataset` and `attrs`, byte for byte.

h5py tracks every identifier, which costs some 10 us each while it holds the interpreter's lock; so types, shapes and
properties are created once and cached. h5py has no type annotations: the names below stand in for its types.
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
    """Create a dataset, with the groups on its path; returns its identifier."""
    kind, space = file_type(array.dtype), simple_space(array.shape)
    dataset = h5py.h5d.create(where, path.encode(), kind, space, _untimed(h5py.h5p.DATASET_CREATE), lcpl=with_groups())
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array, kind)
    return dataset


def reserve_array(where: Identifier, path: str, array: np.ndarray) -> Identifier:
    """As `write_array`, but only allocates space in the file, where the values can be written later."""
    kind, space = file_type(array.dtype), simple_space(array.shape)
    return h5py.h5d.create(where, path.encode(), kind, space, _reserved(), lcpl=with_groups())


def write_texts(where: Identifier, path: str, texts: Sequence[str]) -> Identifier:
    """Create a dataset of texts of variable length; returns its identifier."""
    (kind, in_memory), creation = _text_types(), _untimed(h5py.h5p.DATASET_CREATE)
    dataset = h5py.h5d.create(where, path.encode(), kind, simple_space((len(texts),)), creation)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(texts, _TEXT), in_memory)
    return dataset


def write_group(where: Identifier, path: str) -> Group:
    """Create a group, with those on its path."""
    return h5py.Group(h5py.h5g.create(where, path.encode(), lcpl=with_groups(), gcpl=_untimed(h5py.h5p.GROUP_CREATE)))


def write_attribute(where: Identifier, name: str, value: str | int | float | np.generic) -> None:
    text = isinstance(value, str)
    stored = np.asarray(value, _TEXT if text else None)
    kind, in_memory = _text_types() if text else (file_type(stored.dtype),) * 2
    h5py.h5a.create(where, name.encode(), kind, simple_space(())).write(stored, in_memory)


def write_scale(file: Identifier, name: str, extent: int) -> Identifier:
    """Create a dimension scale without coordinates, as netCDF does; returns its identifier."""
    creation = _untimed(h5py.h5p.DATASET_CREATE)
    scale = h5py.h5d.create(file, name.encode(), file_type(np.dtype("f4")), simple_space((extent,)), creation)
    h5py.h5ds.set_scale(scale, b"This is a netCDF dimension but not a netCDF variable.%10d" % extent)
    return scale


def make_reference(scale: Identifier) -> np.ndarray:
    """Returns a reference to a dimension scale, for `name_axes`."""
    return np.array([h5py.h5r.create(scale, b".", h5py.h5r.OBJECT)], h5py.ref_dtype)


def name_axes(dataset: Identifier, scales: Sequence[np.ndarray]) -> None:
    """Name all axes of a dataset by a reference each; HDF5's own function also lists the dataset in each scale."""
    kind, in_memory = _reference_types()
    by_axis = np.empty(len(scales), h5py.vlen_dtype(h5py.ref_dtype))
    for axis, scale in enumerate(scales):
        by_axis[axis] = scale
    h5py.h5a.create(dataset, b"DIMENSION_LIST", kind, simple_space(by_axis.shape)).write(by_axis, in_memory)


@cache
def _reference_types() -> tuple[Any, Any]:
    """Returns HDF5's types, in the file and in memory, of the references of one axis."""
    dtype = h5py.vlen_dtype(h5py.ref_dtype)
    return h5py.h5t.py_create(dtype, logical=True), h5py.h5t.py_create(dtype)


@cache
def with_groups() -> Any:
    """Returns the link property that creates the groups on a path."""
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
    """Returns HDF5's type of an array; cached only without metadata, in which equal dtypes may differ."""
    return h5py.h5t.py_create(dtype, logical=True) if dtype.metadata else _plain_file_type(dtype)


@cache
def _plain_file_type(dtype: np.dtype) -> Any:
    return h5py.h5t.py_create(dtype, logical=True)


@cache
def _text_types() -> tuple[Any, Any]:
    """Returns HDF5's types of a text, in the file and in memory."""
    return h5py.h5t.py_create(_TEXT, logical=True), h5py.h5t.py_create(_TEXT)


@lru_cache(maxsize=256)
def simple_space(shape: tuple[int, ...]) -> Any:
    """Returns HDF5's dataspace of an array."""
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


def select_rows(extent: int, runs: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> Any:
    """Returns the dataspace of an array [extent, *shape] with runs of rows selected, each (first, number)."""
    space = h5py.h5s.create_simple((extent, *shape))
    space.select_none()
    for first, number in runs:
        space.select_hyperslab(
            (first, *[0] * len(shape)), (1, *[1] * len(shape)), block=(number, *shape), op=h5py.h5s.SELECT_OR
        )
    return space


def untimed(kind: Any) -> Any:
    """Returns new creation properties without time stamps, so that equal content gives equal bytes."""
    creation = h5py.h5p.create(kind)
    creation.set_obj_track_times(False)
    return creation


_untimed = cache(untimed)
