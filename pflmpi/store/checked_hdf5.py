"""HDF5 files with checksums, written in one go and checked when they are read.

A file starts with an HDF5 user block of 512 bytes, which every HDF5 program skips. It holds one line of text with the
length and the CRC-32 of the rest. So a damaged file is detected before the HDF5 library, which may crash on one, reads
it.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from zlib_ng import zlib_ng as zlib

from pflmpi import atomic
from pflmpi.errors import CheckpointError, PflmpiError
from pflmpi.store.checksums import Part, crc32, crc32_of_file
from pflmpi.store.hdf5 import File, Group, Identifier, h5py, write_array, write_attribute
from pflmpi.store.large_files.target import Target

# 1: without `received`, `diagnostics` and descriptions; 2: booleans of clients are not known to be missing;
# 3: `history` is the whole of metrics.csv.
FORMAT_VERSION = 4

_HEAD_BYTES = 512
_WRITTEN = b"pflmpi bytes=%d crc32=%08x\n"
_HEAD = re.compile(rb"pflmpi bytes=(\d+) crc32=([0-9a-f]{8})\n\0*")
_SMALL = 1 << 20  # bytes of arrays up to which a file is made in memory
_LIBRARY = ("v110", "v110")  # readable by any HDF5 since 1.10; its metadata have checksums of their own


class Checksum(NamedTuple):
    """What the head of a file records about the rest: enough to distinguish it from any other file."""

    bytes: int
    crc32: int


class NewerFormatError(CheckpointError):
    """A file in a format of a newer pflmpi."""


def write(path: Path, fill: Callable[[File], Iterable[Part] | None], size: int | None = None) -> None:
    """Write an HDF5 file atomically.

    Args:
        fill: writes the content; may return parts of the file whose checksums it knows, which are not read again.
        size: bytes of the arrays, if known. A small file is made in memory, which takes less of the processor.

    Raises:
        OSError: see `atomic.replacing`.
    """
    if size is not None and size <= _SMALL:
        memory = {"driver": "core", "backing_store": False}
        with h5py.File(path, "w", userblock_size=_HEAD_BYTES, libver=_LIBRARY, **memory) as file:
            write_attribute(file.id, "format_version", FORMAT_VERSION)
            fill(file)
            file.flush()
            content = file.id.get_file_image()  # without the user block
        atomic.write(path, (_WRITTEN % (len(content), zlib.crc32(content))).ljust(_HEAD_BYTES, b"\0") + content)
        return
    with atomic.replacing(path) as descriptor:
        target = Target(descriptor)
        try:
            with h5py.File(target, "w", userblock_size=_HEAD_BYTES, libver=_LIBRARY) as file:
                write_attribute(file.id, "format_version", FORMAT_VERSION)
                known = fill(file) or ()
        finally:
            target.finish()  # raises a disk error rather than what followed from it
        atomic.write_at(descriptor, _WRITTEN % crc32_of_file(descriptor, _HEAD_BYTES, known), 0)


def put(group: Group, path: str, array: np.ndarray, checksum: int | None = None) -> Identifier:
    """Store an array with the CRC-32 of its bytes, which is `checksum` if that is known; its identifier."""
    array = np.asarray(array, order="C")
    assert array.dtype.kind in "biufcS", f"{path}: arrays of {array.dtype} cannot be stored"
    dataset = write_array(group.id, path, array)
    write_attribute(dataset, "crc32", np.uint32(crc32(array) if checksum is None else checksum))
    return dataset


def get(group: Group, path: str) -> np.ndarray:
    """Read an array and verify its checksum.

    Raises:
        CheckpointError: its bytes are not those that were written.
    """
    dataset = group[path]
    array: np.ndarray = np.asarray(dataset[()])
    expected = int(dataset.attrs["crc32"])
    if (found := crc32(array)) != expected:
        raise CheckpointError(
            f"{dataset.name} in {group.file.filename} is damaged: its CRC-32 is {found:08x}, written was {expected:08x}"
        )
    return array


def names(group: Group, prefix: str = "") -> list[str]:
    """Paths of all datasets below a group, sorted; virtual ones and those behind links too."""
    found: list[str] = []
    for name, item in group.items():
        found += [prefix + name] if isinstance(item, h5py.Dataset) else names(item, f"{prefix}{name}/")
    return sorted(found)


def _opened(path: Path) -> File:
    try:  # No lock: the file never changes, and locks fail on some cluster file systems.
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "locking flag" not in str(error):
            raise
        return h5py.File(path, "r")  # this process has it open already, with a lock


# What h5py raises, and what a file of another form leads to.
_OF_A_FILE = OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, MemoryError


@contextmanager
def reading(path: Path) -> Iterator[File]:
    """Open a file for reading.

    Raises:
        CheckpointError: it is missing, unreadable, or written by a newer pflmpi; also if what the block reads
            is not there, or of another form.
    """
    try:
        with _opened(path) as file:
            version = int(file.attrs["format_version"])
            if version > FORMAT_VERSION:
                raise NewerFormatError(
                    f"{path} was written by a newer pflmpi: its format version is {version}, this one reads up to "
                    f"{FORMAT_VERSION}; update pflmpi"
                )
            yield file
    except PflmpiError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except _OF_A_FILE as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise CheckpointError(f"{path} cannot be read: {' '.join(str(text).split())}") from error


def recorded_checksum(path: Path) -> Checksum:
    """Checksum of a file, read from its head.

    Raises:
        CheckpointError: it is missing, or not a file of pflmpi.
    """
    found, problem = _head(path)
    if found is None:
        raise CheckpointError(problem)
    return found


def damage(path: Path) -> str | None:
    """Problem with the bytes of a file, or None; every byte is read."""
    return _problem(path, whole=True)


def cut_short(path: Path) -> str | None:
    """Problem with the head or the length of a file, or None; only the head is read."""
    return _problem(path, whole=False)


def _problem(path: Path, whole: bool) -> str | None:
    expected, problem = _head(path)
    if expected is None:
        return problem
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size - _HEAD_BYTES
            found = Checksum(*crc32_of_file(file.fileno(), _HEAD_BYTES)) if whole else Checksum(size, expected.crc32)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if found.bytes != expected.bytes:
        return f"{path} is damaged: {found.bytes + _HEAD_BYTES} bytes long, {expected.bytes + _HEAD_BYTES} were written"
    if found.crc32 != expected.crc32:
        return f"{path} is damaged: its CRC-32 is {found.crc32:08x}, {expected.crc32:08x} was written"
    return None


def _head(path: Path) -> tuple[Checksum | None, str]:
    """Checksum of a file, or None and the problem."""
    try:
        with path.open("rb") as file:
            head = _HEAD.fullmatch(file.read(_HEAD_BYTES))
    except FileNotFoundError:
        return None, f"{path} is missing"
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror}"
    if head is None:
        return None, f"{path} is damaged: it does not begin like a file of pflmpi"
    return Checksum(int(head[1]), int(head[2], 16)), ""
