"""Reads arrays from a user's .npz and HDF5 files; nothing is unpickled, and every problem is a `ValueError`."""

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

_READING = Lock()  # numpy parses headers with `ast`, which fails in two threads at once in early Python 3.11 releases


@dataclass(frozen=True)
class OwnArrays:
    """The content of a user's file or folder.

    Attributes:
        x: [n, ...].
        y: [n] labels of any type.
        client: [n] the client of each sample, of any type; None if not given.
        test: bool [n], for `data.split: official`; None if not given.
        validation: bool [n], training samples that are kept for validation; None if not given.
        class_names: of the labels 0, 1, ..., or of the classes in sorted order; None: the labels themselves, if text.
        num_classes: K, where y has numbers from 0 to K - 1; None: the classes are those in y.
        columns: names of the columns of x, in a table.
        label_columns: names of the columns of y, in a table.
        layout: `nchw` or `nhwc`, where the file or the user gives it.
        characters: those that x numbers from 1, in texts.
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
    characters: str = ""


def concatenate_parts(parts: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenates the parts of a dataset, each (name, x, y); returns x, y and the number of each sample's part [n].

    Raises:
        ValueError: there are no samples, or a part has samples of another shape or type than the first.
    """
    nonempty = [(name, x, y) for name, x, y in parts if len(x) or len(y)]
    if not nonempty:
        raise ValueError("it has no samples")
    _, first_x, first_y = nonempty[0]
    for name, x, y in nonempty:
        if len(x) != len(y):
            raise ValueError(f"{name} has {len(x)} samples and {len(y)} labels")
        if _shape_and_type(x, y) != _shape_and_type(first_x, first_y):
            kinds, first = (f"{a.dtype} {list(a.shape[1:])} and {b.dtype}" for a, b in ((x, y), (first_x, first_y)))
            raise ValueError(f"{name} has samples and labels {kinds}, the first {first}")
    part_numbers = np.repeat(np.arange(len(parts)), [len(x) for _, x, _ in parts])
    return np.concatenate([x for _, x, _ in nonempty]), np.concatenate([y for _, _, y in nonempty]), part_numbers


def _shape_and_type(x: np.ndarray, y: np.ndarray) -> tuple[object, ...]:
    """What all parts of a dataset must agree in."""
    return x.shape[1:], y.shape[1:], x.dtype == np.uint8, x.dtype.kind in "SU", y.dtype.kind in "SU"


def read_npz(path: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Returns the named arrays, and those of the optional ones that the file has.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an archive, or an array that is missing, damaged, pickled or larger than the memory.
    """
    with _open_npz(path) as archive:
        present = [name for name in optional if f"{name}.npy" in archive.namelist()]
        return {name: _read_npz_array(archive, name) for name in (*names, *present)}


def read_npz_names(path: Path) -> list[str]:
    """Returns the names of the arrays; raises as `read_npz`."""
    with _open_npz(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


@contextmanager
def _open_npz(path: Path) -> Iterator[zipfile.ZipFile]:
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


def _read_npz_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Reads an array after checking its unpacked length against its header and against this node's memory."""
    if f"{name}.npy" not in archive.namelist():
        raise ValueError(f"no array {name!r} in it")
    length = archive.getinfo(f"{name}.npy").file_size
    check_memory(length)
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(member)
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
    """Raises `ValueError` for more bytes than this node has memory: a few kilobytes may unpack to terabytes."""
    total = machine.memory().total
    if length > total:
        raise ValueError(f"it unpacks to {format_bytes(length)}, and this node has {format_bytes(total)} of memory")


h5py: Any = _h5py  # which has no type annotations


def read_h5(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns those of the named datasets that the file has.

    Raises:
        ValueError: not an HDF5 file, or a dataset that is damaged, in another file, too large for the memory, or null.
    """
    with _open_h5(path) as file:
        return {name: _read_h5_array(file, name) for name in names if name in file}


def read_h5_names(path: Path) -> list[str]:
    """Returns the names of the datasets and groups; raises as `read_h5`."""
    with _open_h5(path) as file:
        return list(file)


@contextmanager
def _open_h5(path: Path) -> Iterator[Any]:
    try:
        with h5py.File(path, "r") as file:
            refuse_external_links(file)
            yield file
    except Exception as error:  # h5py raises half a dozen kinds for damaged bytes
        raise ValueError(first_line(error)) from error


def _read_h5_array(file: Any, name: str) -> np.ndarray:
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{name!r} in it is no array")
    refuse_unstored(dataset)  # before anything else is read of it
    if dataset.shape is None:
        raise ValueError(f"{name!r} in it is no array")
    check_memory(dataset.nbytes)
    return np.asarray(dataset.asstr()[()] if h5py.check_string_dtype(dataset.dtype) else dataset[()])
