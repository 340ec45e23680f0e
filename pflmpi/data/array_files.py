"""Arrays from .npz and HDF5 files of the user's: nothing is unpickled, and every problem is a `ValueError`."""

import zipfile
from pathlib import Path
from threading import Lock
from typing import Any

import h5py as _h5py
import numpy as np

from pflmpi import machine
from pflmpi.contained_hdf5 import refuse_external_links, refuse_unstored
from pflmpi.text import first_line, size

_READING = Lock()  # numpy parses heads by `ast`, which in early versions of Python 3.11 fails in two threads at once


def read_npz(path: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The named arrays, and those of the optional ones that are there.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an archive, or an array that is missing, damaged, pickled or larger than the memory.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    # Opened here: numpy leaves the file open when the archive is damaged.
    with _READING, path.open("rb") as file:
        try:
            if not zipfile.is_zipfile(file):
                raise ValueError("not an .npz archive, or cut short")
            with zipfile.ZipFile(file) as archive:
                there = [name for name in optional if f"{name}.npy" in archive.namelist()]
                return {name: _npz_array(archive, name) for name in (*names, *there)}
        except MemoryError:
            raise
        except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds for damaged bytes
            raise ValueError(first_line(error)) from error


def _npz_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array whose file is not longer, unpacked, than its head says, nor than the memory."""
    if f"{name}.npy" not in archive.namelist():
        raise ValueError(f"no array {name!r} in it")
    length = archive.getinfo(f"{name}.npy").file_size
    check_memory(length)
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read_head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_head(member)
        if dtype.hasobject:
            raise ValueError(f"the array {name!r} is pickled")
        if (stated_length := member.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize) != length:
            raise ValueError(f"the array {name!r} has {length} bytes, and its head says {stated_length}")
    with archive.open(f"{name}.npy") as member:
        return np.asarray(np.lib.format.read_array(member, allow_pickle=False))


def check_memory(length: int) -> None:
    """Raise `ValueError` for more bytes than this node has: a few kilobytes may unpack to terabytes."""
    if length > (most := machine.memory().total):
        raise ValueError(f"it unpacks to {size(length)}, and this node has {size(most)} of memory")


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
            return {name: _h5_array(file, name) for name in names if name in file}
    except Exception as error:  # h5py raises half a dozen kinds for damaged bytes
        raise ValueError(first_line(error)) from error


def _h5_array(file: Any, name: str) -> np.ndarray:
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{name!r} in it is no array")
    refuse_unstored(dataset)
    if dataset.shape is None:
        raise ValueError(f"{name!r} in it is no array")
    check_memory(dataset.nbytes)
    return np.asarray(dataset.asstr()[()] if h5py.check_string_dtype(dataset.dtype) else dataset[()])
