"""Arrays from .npz and HDF5 files of the user's: nothing is unpickled, and every problem is a `ValueError`."""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import h5py as _h5py
import numpy as np

from pflmpi import machine
from pflmpi.contained_hdf5 import refuse_external_links, refuse_unstored
from pflmpi.text import first_line, format_bytes

_READING = Lock()  # numpy parses heads by `ast`, which in early versions of Python 3.11 fails in two threads at once


@dataclass(frozen=True)
class OwnArrays:
    """What a file or folder of the user's holds.

    Attributes:
        x: [n, ...].
        y: [n] labels of any kind.
        client: [n] whose samples they are, of any kind; None: not said.
        test: bool [n], for `data.split: official`; None: not said.
        validation: bool [n], samples kept out of training that are none for testing; None: not said.
        class_names: of the labels 0, 1, ..., or of the classes in sorted order; None: as in y, if it has texts.
        num_classes: K, where y has numbers from 0 to K - 1; None: the classes are those in y.
        columns: what the values of a sample are called, in a table.
        label_columns: which columns of a table y is from.
        layout: `nchw` or `nhwc`, where the file or the user says it.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None = None
    test: np.ndarray | None = None
    validation: np.ndarray | None = None
    class_names: np.ndarray | None = None
    num_classes: int | None = None
    columns: tuple[str, ...] = ()
    label_columns: tuple[str, ...] = ()
    layout: str | None = None


def joined(parts: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x and y of the samples [n] of all parts, each a name, x and y; and the number of each sample's part [n].

    Raises:
        ValueError: there are no samples, or those of a part are not like the first.
    """
    filled = [part for part in parts if len(part[1]) or len(part[2])]
    for name, x, y in filled:
        if len(x) != len(y):
            raise ValueError(f"{name} has {len(x)} samples and {len(y)} labels")
        if _form(x, y) != _form(*filled[0][1:]):
            kinds, first = (f"{a.dtype} {list(a.shape[1:])} and {b.dtype}" for a, b in ((x, y), filled[0][1:]))
            raise ValueError(f"{name} has samples and labels {kinds}, the first {first}")
    if not filled:
        raise ValueError("it has no samples")
    x, y = (np.concatenate([part[place] for part in filled]) for place in (1, 2))
    return x, y, np.repeat(np.arange(len(parts)), [len(part[1]) for part in parts])


def _form(x: np.ndarray, y: np.ndarray) -> tuple[object, ...]:
    """What samples and labels must have in common to be of one dataset."""
    return x.shape[1:], y.shape[1:], x.dtype == np.uint8, x.dtype.kind in "SU", y.dtype.kind in "SU"


def read_npz(path: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The named arrays, and those of the optional ones that are there.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an archive, or an array that is missing, damaged, pickled or larger than the memory.
    """
    with _npz(path) as archive:
        there = [name for name in optional if f"{name}.npy" in archive.namelist()]
        return {name: _npz_array(archive, name) for name in (*names, *there)}


def npz_names(path: Path) -> list[str]:
    """What the arrays are called; raises as `read_npz`."""
    with _npz(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


@contextmanager
def _npz(path: Path) -> Iterator[zipfile.ZipFile]:
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    # Opened here: numpy leaves the file open when the archive is damaged.
    with _READING, path.open("rb") as file:
        try:
            if not zipfile.is_zipfile(file):
                raise ValueError("not an .npz archive, or cut short")
            with zipfile.ZipFile(file) as archive:
                yield archive
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
            raise ValueError(
                f"the array {name!r} is pickled, as numpy saves one of objects; save texts as {name}.astype(str), and "
                f"numbers as {name}.astype(float)"
            )
        if (stated_length := member.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize) != length:
            raise ValueError(f"the array {name!r} has {length} bytes, and its head says {stated_length}")
    with archive.open(f"{name}.npy") as member:
        return np.asarray(np.lib.format.read_array(member, allow_pickle=False))


def check_memory(length: int) -> None:
    """Raise `ValueError` for more bytes than this node has: a few kilobytes may unpack to terabytes."""
    if length > (most := machine.memory().total):
        raise ValueError(f"it unpacks to {format_bytes(length)}, and this node has {format_bytes(most)} of memory")


h5py: Any = _h5py  # which has no type annotations


def read_h5(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Those of the named datasets that are there.

    Raises:
        ValueError: not an HDF5 file, or a dataset that is damaged, in another file, too large for the memory, or none.
    """
    with _h5(path) as file:
        return {name: _h5_array(file, name) for name in names if name in file}


def h5_names(path: Path) -> list[str]:
    """What the datasets and groups are called; raises as `read_h5`."""
    with _h5(path) as file:
        return list(file)


@contextmanager
def _h5(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise ValueError("it is no regular file")
    try:
        with h5py.File(path, "r") as file:
            refuse_external_links(file)
            yield file
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
