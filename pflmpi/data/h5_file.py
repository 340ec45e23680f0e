"""Arrays from an HDF5 file of the user's."""

from pathlib import Path
from typing import Any

import h5py as _h5py
import numpy as np

from pflmpi.contained_hdf5 import refuse_external_links, refuse_unstored
from pflmpi.data.npz import check_memory
from pflmpi.text import first_line

h5py: Any = _h5py  # which has no type annotations


def read_h5(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Those of the named datasets that are there.

    Raises:
        ValueError: not an HDF5 file, or a dataset that is damaged, in another file, too large for the memory, or none.
    """
    if not path.is_file():
        raise ValueError("it is no regular file")
    try:
        with h5py.File(path, "r") as file:
            refuse_external_links(file)
            return {name: _array(file, name) for name in names if name in file}
    except Exception as error:  # h5py raises half a dozen kinds for damaged bytes
        raise ValueError(first_line(error)) from error


def _array(file: Any, name: str) -> np.ndarray:
    found = file[name]
    if not isinstance(found, h5py.Dataset):
        raise ValueError(f"{name!r} in it is no array")
    refuse_unstored(found)
    if found.shape is None:
        raise ValueError(f"{name!r} in it is no array")
    check_memory(found.nbytes)
    return np.asarray(found.asstr()[()] if h5py.check_string_dtype(found.dtype) else found[()])
