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

from pflmpi import atomic, regular_file
from pflmpi.contained_hdf5 import is_virtual, refuse_external_links, refuse_other_sources, refuse_unstored
from pflmpi.errors import CheckpointError, PflmpiError
from pflmpi.store.checksums import Part, crc32, crc32_of_file
from pflmpi.store.hdf5 import Dataset, File, Group, Identifier, h5py, write_array, write_attribute
from pflmpi.store.large_files.target import Target
from pflmpi.store.names import SHARD_NAME

# 1: without `received`, `diagnostics` and descriptions; 2: booleans of clients are not known to be missing;
# 3: `history` is the whole of metrics.csv.
FORMAT_VERSION = 4

_HEAD_BYTES = 512
_WRITTEN = b"pflmpi bytes=%d crc32=%08x\n"
_HEAD = re.compile(rb"pflmpi bytes=(\d+) crc32=([0-9a-f]{8})\n\0*")
_PIECE = 1 << 25  # bytes of an array in memory while it is checked
_KINDS = "biufcS"  # of arrays
_SOURCE = re.compile(rf"\.|{SHARD_NAME.pattern}")  # of virtual datasets: the file itself, or a shard
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
    assert array.dtype.kind in _KINDS, f"{path}: arrays of {array.dtype} cannot be stored"
    dataset = write_array(group.id, path, array)
    write_attribute(dataset, "crc32", np.uint32(crc32(array) if checksum is None else checksum))
    return dataset


def get(group: Group, path: str) -> np.ndarray:
    """Read an array and verify its checksum.

    Raises:
        CheckpointError: its bytes are not those that were written.
    """
    dataset = stored(group, path)
    array: np.ndarray = np.asarray(dataset[()])
    if problem := _other(dataset, crc32(array)):
        raise CheckpointError(problem)
    return array


def damaged_arrays(path: Path) -> list[str]:
    """Problems with the arrays of a file that have a checksum of their own; a piece at a time is in memory.

    Raises:
        CheckpointError: see `reading`.
    """
    with reading(path) as file:
        arrays = [file[name] for name in names(file) if "crc32" in file[name].attrs]
        return [problem for array in arrays if (problem := _other(array, _crc32_in_pieces(array)))]


def _crc32_in_pieces(dataset: Dataset) -> int:
    if not dataset.shape:
        return crc32(np.asarray(dataset[()]))
    found, at_once = 0, max(1, _PIECE * len(dataset) // max(dataset.nbytes, 1))
    for start in range(0, len(dataset), at_once):
        found = crc32(dataset[start : start + at_once], found)
    return found


def _other(dataset: Dataset, found: int) -> str | None:
    """Says that an array has another CRC-32 than was written; None if it has not."""
    if found == (expected := int(dataset.attrs["crc32"])):
        return None
    where = f"{dataset.name} in {dataset.file.filename}"
    return f"{where} is damaged: its CRC-32 is {found:08x}, written was {expected:08x}"


def stored(group: Group, path: str) -> Dataset:
    """A dataset whose values may be read: all of them are in this file.

    Raises:
        ValueError: they are not, or it is no array of numbers.
    """
    dataset = group[path]
    refuse_unstored(dataset)
    if dataset.dtype.kind not in _KINDS:
        raise ValueError(f"{dataset.name} in it is of {dataset.dtype}, which no pflmpi writes")
    return dataset


def names(group: Group) -> list[str]:
    """Paths of all datasets below a group, sorted; virtual ones and those behind links too."""
    found: list[bytes] = []
    if len(group):
        group.id.links.visit(found.append)  # each group once, however many paths lead to it
    paths = [path for path in found if h5py.h5o.get_info(group.id, path).type == h5py.h5o.TYPE_DATASET]
    return sorted(path.decode() for path in paths)


def _opened(path: Path) -> File:
    regular_file.check(path)
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
            refuse_external_links(file)
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
    """Problem with the bytes of a file, or with what they refer to, or None; every byte is read."""
    if problem := _problem(path, whole=True):
        return problem
    try:
        with reading(path) as file:
            for name in names(file):
                if is_virtual(file[name]):
                    refuse_other_sources(file[name], _SOURCE)
                else:
                    stored(file, name)
    except CheckpointError as error:
        return str(error)
    return None


def cut_short(path: Path) -> str | None:
    """Problem with the head or the length of a file, or None; only the head is read."""
    return _problem(path, whole=False)


def _problem(path: Path, whole: bool) -> str | None:
    expected, problem = _head(path)
    if expected is None:
        return problem
    try:
        with regular_file.opened(path) as file:
            found = Checksum(os.fstat(file.fileno()).st_size - _HEAD_BYTES, expected.crc32)
            if whole and found.bytes == expected.bytes:
                found = Checksum(*crc32_of_file(file.fileno(), _HEAD_BYTES))
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
        with regular_file.opened(path) as file:
            head = _HEAD.fullmatch(file.read(_HEAD_BYTES))
    except FileNotFoundError:
        return None, f"{path} is missing"
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror}"
    if head is None:
        return None, f"{path} is damaged: it does not begin like a file of pflmpi"
    return Checksum(int(head[1]), int(head[2], 16)), ""
