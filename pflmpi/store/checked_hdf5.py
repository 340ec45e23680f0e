"""HDF5 files with checksums, written in one go and checked when they are read.

A file starts with an HDF5 user block of 512 bytes, which every HDF5 program skips. It holds one line of text with the
length and the CRC-32 of the rest, so that damage is detected before the HDF5 library reads the file: it may crash on a
damaged one. The attribute `about` is JSON: the metadata of the file, and under `arrays`, for each array by path,
`crc32` (zlib's, over its bytes in C order), `unit` and `description`. One text is cheap, whereas each HDF5 attribute
costs as much as a small array.
"""

import copy
import errno
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from zlib_ng import zlib_ng as zlib

from pflmpi import atomic, regular_file
from pflmpi.contained_hdf5 import is_virtual, refuse_external_links, refuse_other_sources, refuse_unstored
from pflmpi.errors import CheckpointError, PflmpiError
from pflmpi.store.checksums import Part, crc32, crc32_of_file
from pflmpi.store.hdf5 import (
    Dataset,
    File,
    Group,
    Identifier,
    h5py,
    make_reference,
    name_axes,
    reserve_array,
    write_array,
    write_attribute,
    write_scale,
    write_texts,
)
from pflmpi.store.names import SHARD_NAME

FORMAT_VERSION = 6
CLASS_NAMES = "class"  # coordinates of the class axis, the only dataset of texts

_HEAD_BYTES = 512
_WRITTEN = b"pflmpi bytes=%d crc32=%08x\n"
_HEAD = re.compile(rb"pflmpi bytes=(\d+) crc32=([0-9a-f]{8})\n\0*")
_PIECE = 1 << 25  # bytes of an array in memory while it is checked
_DTYPE_KINDS = "biufcS"  # that arrays may have
_SOURCE = re.compile(rf"\.|{SHARD_NAME.pattern}")  # of virtual datasets: the file itself, or a shard
_SMALL = 1 << 20  # bytes: smaller files are made in memory, smaller arrays are written by HDF5 itself
_LIBRARY = ("v110", "v110")  # readable by any HDF5 since 1.10; its metadata have checksums of their own


class Checksum(NamedTuple):
    """What the head of a file records about the rest: enough to distinguish it from any other file."""

    bytes: int
    crc32: int


class Description(NamedTuple):
    """What `about` says of an array."""

    unit: str = ""
    axes: tuple[str, ...] | None = None  # names of the first axes; None for an array whose axes get no names
    text: str = ""


_UNDESCRIBED = Description()


# Errors that say nothing about the bytes of a file: of this user's rights, of a disk or a server, of a limit.
_OF_ACCESS = {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE}


class NewerFormatError(CheckpointError):
    """A file in a format of a newer pflmpi."""


class UnreadableError(CheckpointError):
    """A file that this user, or this machine at the moment, cannot read; its bytes may be good."""


class HDF5Writer:
    """An HDF5 file that is being written.

    Attributes:
        file: the open `h5py.File`.
        about: becomes the attribute `about`.
        large: arrays to write after HDF5 has closed the file, each with its position and CRC-32. HDF5 would hold the
            interpreter's lock while it writes them.
    """

    def __init__(self, file: File, in_memory: bool) -> None:
        self.file = file
        self.about: dict[str, Any] = {"arrays": {}}
        self.large: list[tuple[Part, np.ndarray]] = []
        self._in_memory = in_memory
        self._scales: dict[str, tuple[np.ndarray, int]] = {}  # reference and extent by name
        for name, item in file.items():  # of a copy
            if isinstance(item, h5py.Dataset) and item.is_scale:
                self._scales[name] = make_reference(item.id), len(item)

    def write_dataset(self, path: str, array: np.ndarray, description: Description = _UNDESCRIBED) -> Identifier:
        """Stores an array with its CRC-32; returns the identifier of the dataset."""
        array = np.asarray(array, order="C")
        assert array.dtype.kind in _DTYPE_KINDS, f"{path}: arrays of {array.dtype} cannot be stored"
        checksum = crc32(array)
        large = not self._in_memory and array.nbytes > _SMALL
        dataset = (reserve_array if large else write_array)(self.file.id, path, array)
        if large:
            self.large.append((Part(dataset.get_offset(), array.nbytes, checksum), array))
        self.describe(path, checksum, description)
        if description.axes is not None and array.shape:
            self.name_axes(dataset, array.shape, description.axes)
        return dataset

    def describe(self, path: str, checksum: int | None, description: Description = _UNDESCRIBED) -> None:
        """Adds what `about` says of an array; `checksum` is None for a virtual dataset."""
        entry = self.about["arrays"].setdefault(path, {})
        if checksum is not None:
            entry["crc32"] = checksum
        if description.unit:
            entry["unit"] = description.unit
        if description.text:
            entry["description"] = description.text

    def write_coordinates(self, name: str, values: np.ndarray | Sequence[str], text: str) -> None:
        """Stores the coordinates [m] of an axis as an HDF5 dimension scale, by which later arrays name that axis.

        Texts have variable length, because xarray's h5netcdf reads texts of fixed length as bytes; they have no
        checksum but that of the file.
        """
        if isinstance(values, np.ndarray):
            dataset = self.write_dataset(name, values, Description(text=text))
        else:
            dataset = write_texts(self.file.id, name, values)
            self.describe(name, None, Description(text=text))
        h5py.h5ds.set_scale(dataset, name.encode())
        self._scales[name] = make_reference(dataset), len(values)

    def name_axes(self, dataset: Identifier, shape: tuple[int, ...], axes: Sequence[str]) -> None:
        """Names all axes of a dataset by scales: the first as in `axes`, the others by their extents.

        The extent is appended to a name that an axis of another extent has, and a number to a repeated one.
        """
        scales, names = [], list[str]()
        for axis, extent in enumerate(shape):
            name = axes[axis] if axis < len(axes) else f"size_{extent}"
            if name in self._scales and self._scales[name][1] != extent:
                name = f"{name}_{extent}"
            names.append(name)
            if (number := names.count(name)) > 1:  # xarray allows each name once in an array
                name = f"{name}.{number}"
            if name not in self._scales:
                self._scales[name] = make_reference(write_scale(self.file.id, name, extent)), extent
            scales.append(self._scales[name][0])
        name_axes(dataset, scales)


def write(path: Path, fill: Callable[[HDF5Writer], None], size: int | None = None, copied: Path | None = None) -> None:
    """Writes an HDF5 file atomically.

    Args:
        fill: writes the content.
        size: bytes of the arrays, if known. A small file is made in memory, which takes less CPU time.
        copied: a file whose content the new one starts with.

    Raises:
        OSError: see `atomic.replacing`.
        CheckpointError: the file to copy is missing or damaged.
    """
    if size is not None and size <= _SMALL:
        # HDF5 leaves half a block of metadata empty at the end.
        memory = {"driver": "core", "backing_store": False, "meta_block_size": 1024}
        with h5py.File(path, "w", userblock_size=_HEAD_BYTES, libver=_LIBRARY, **memory) as file:
            _fill(HDF5Writer(file, in_memory=True), fill)
            file.flush()
            content = file.id.get_file_image()  # without the user block
        atomic.write(path, (_WRITTEN % (len(content), zlib.crc32(content))).ljust(_HEAD_BYTES, b"\0") + content)
        return
    with atomic.replacing(path) as descriptor:
        target = _Target(descriptor, "r+", closefd=False)
        try:
            userblock = {"userblock_size": _HEAD_BYTES} if copied is None else {}
            if copied is not None:
                _copy(copied, descriptor)
            with h5py.File(target, "w" if copied is None else "r+", libver=_LIBRARY, **userblock) as file:
                writer = HDF5Writer(file, in_memory=False)
                _fill(writer, fill)
        finally:
            if target.error is not None:
                raise target.error  # rather than an error of HDF5 that followed from it
        for part, array in writer.large:
            atomic.write_at(descriptor, array.reshape(-1).view(np.uint8).data, part.start)
        parts = [part for part, _ in writer.large]
        atomic.write_at(descriptor, _WRITTEN % crc32_of_file(descriptor, _HEAD_BYTES, parts), 0)


def copy_file(source: Path, path: Path) -> None:
    """Copies a file after checking every byte; raises as `write`."""
    with atomic.replacing(path) as descriptor:
        _copy(source, descriptor)


def _copy(source: Path, descriptor: int) -> None:
    if problem := find_damage(source):
        raise CheckpointError(problem)
    with regular_file.open_regular(source) as file:
        while piece := file.read(_PIECE):
            atomic.write_at(descriptor, piece, file.tell() - len(piece))


def _fill(writer: HDF5Writer, fill: Callable[[HDF5Writer], None]) -> None:
    if "about" in writer.file.attrs:  # a copy
        writer.about = copy.deepcopy(read_about(writer.file))
        writer.file.attrs.clear()
    write_attribute(writer.file.id, "format_version", FORMAT_VERSION)
    fill(writer)
    write_attribute(writer.file.id, "about", json.dumps(writer.about))


class _Target(io.FileIO):
    """The file object that h5py writes to.

    It hides errors from HDF5, which cannot close a file that it cannot write, and crashes on it at exit. After the
    first error nothing more is written.
    """

    error: BaseException | None = None

    def write(self, content: Any) -> int:
        position = self.tell()
        self._attempt(lambda: atomic.write_at(self.fileno(), content, position))
        return self.seek(position + len(content)) - position

    def truncate(self, size: int | None = None) -> int:
        assert size is not None
        self._attempt(lambda: os.ftruncate(self.fileno(), size))
        return size

    def _attempt(self, step: Callable[[], None]) -> None:
        if self.error is None:
            try:
                step()
            except BaseException as error:
                self.error = error


def read_about(file: File) -> dict[str, Any]:
    """Returns the attribute `about` of a file.

    Raises:
        ValueError: it is not what pflmpi writes.
    """
    text = file.attrs["about"]
    if not isinstance(text, str):
        raise ValueError("its attribute 'about' is no text")
    values = _parse_json(text)
    if not isinstance(values, dict) or not isinstance(values.get("arrays"), dict):
        raise ValueError("its attribute 'about' does not describe its arrays")
    return values


def read_numbers(file: File, section: str) -> dict[str, np.ndarray]:
    """Returns the numbers, and lists of numbers, in a section of `about`, by name."""
    arrays = {}
    for name, value in read_about(file).get(section, {}).items():
        values = value if isinstance(value, list) else [value]
        if not all(number is None or isinstance(number, int | float) for number in values):
            raise ValueError(f"{section}/{name} in its attribute 'about' is no number")
        numbers = [np.nan if number is None else number for number in values]  # JSON has no NaN
        arrays[str(name)] = np.array(numbers if isinstance(value, list) else numbers[0])
    return arrays


@lru_cache(maxsize=4)  # several arrays of a file are read one after the other
def _parse_json(text: str) -> Any:
    return json.loads(text)


def read_dataset(group: Group, path: str) -> np.ndarray:
    """Reads an array and verifies its checksum.

    Raises:
        CheckpointError: its bytes are not those that were written.
    """
    dataset = open_stored(group, path)
    array: np.ndarray = np.asarray(dataset[()])
    if problem := _crc32_problem(dataset, crc32(array)):
        raise CheckpointError(problem)
    return array


def _recorded_crc32(dataset: Dataset) -> int | None:
    entry = read_about(dataset.file)["arrays"].get(dataset.name.lstrip("/"), {})
    return int(entry["crc32"]) if "crc32" in entry else None


def damaged_arrays(path: Path) -> list[str]:
    """Returns the problems of the arrays that have a checksum of their own; holds a piece at a time in memory.

    Raises:
        CheckpointError: see `reading`.
    """
    with reading(path) as file:
        arrays = [file[name] for name in names(file) if _recorded_crc32(file[name]) is not None]
        return [problem for array in arrays if (problem := _crc32_problem(array, _crc32_in_pieces(array)))]


def _crc32_in_pieces(dataset: Dataset) -> int:
    if not dataset.shape:
        return crc32(np.asarray(dataset[()]))
    checksum, at_once = 0, max(1, _PIECE * len(dataset) // max(dataset.nbytes, 1))
    for start in range(0, len(dataset), at_once):
        checksum = crc32(dataset[start : start + at_once], checksum)
    return checksum


def _crc32_problem(dataset: Dataset, checksum: int) -> str | None:
    if checksum == (expected := _recorded_crc32(dataset)):
        return None
    where = f"{dataset.name} in {dataset.file.filename}"
    if expected is None:
        return f"{where} has no CRC-32, with which every array is written"
    return f"{where} is damaged: its CRC-32 is {checksum:08x}, written was {expected:08x}"


def open_stored(group: Group, path: str) -> Dataset:
    """Returns a dataset of which every value is stored in this file.

    Raises:
        ValueError: some are not, or it is no array of numbers.
    """
    dataset = group[path]
    refuse_unstored(dataset)
    if dataset.dtype.kind not in _DTYPE_KINDS:
        raise ValueError(f"{dataset.name} in it is of {dataset.dtype}, which no pflmpi writes")
    return dataset


def names(group: Group) -> list[str]:
    """Returns the paths of all datasets below a group, sorted, including virtual and linked ones."""
    links: list[bytes] = []
    if len(group):
        group.id.links.visit(links.append)  # each group once, however many paths lead to it
    paths = [path for path in links if h5py.h5o.get_info(group.id, path).type == h5py.h5o.TYPE_DATASET]
    return sorted(path.decode() for path in paths)


def _opened(path: Path) -> File:
    regular_file.check(path)
    try:  # No lock: the file never changes, and locks fail on some cluster file systems.
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "locking flag" not in str(error):
            raise
        return h5py.File(path, "r")  # this process has it open already, with a lock


# Raised by h5py, or by code that reads a file of another form.
_READING_ERRORS = (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, MemoryError)


@contextmanager
def reading(path: Path) -> Iterator[File]:
    """Opens a file for reading.

    Raises:
        CheckpointError: it is missing, unreadable, or in another format; also for anything that the `with` block reads
            and that is not there, or not of the expected form.
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
            if version < FORMAT_VERSION:
                raise CheckpointError(
                    f"{path} was written by a pflmpi before its first release: its format version is {version}, this "
                    f"one reads {FORMAT_VERSION}; use the version that wrote it, or run it again"
                )
            yield file
    except PflmpiError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except _READING_ERRORS as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise CheckpointError(f"{path} cannot be read: {' '.join(str(text).split())}") from error


def recorded_checksum(path: Path) -> Checksum:
    """Reads the checksum of a file from its head; `CheckpointError` if it is missing, or no file of pflmpi."""
    with _opened_bytes(path) as file:
        head = _HEAD.fullmatch(file.read(_HEAD_BYTES))
    if head is None:
        raise CheckpointError(f"{path} is damaged: it does not begin like a file of pflmpi")
    return Checksum(int(head[1]), int(head[2], 16))


@contextmanager
def _opened_bytes(path: Path) -> Iterator[BinaryIO]:
    try:
        with regular_file.open_regular(path) as file:
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        kind = UnreadableError if error.errno in _OF_ACCESS else CheckpointError
        raise kind(f"{path} cannot be read: {error.strerror}") from error


def find_damage(path: Path) -> str | None:
    """Returns the problem with the bytes of a file, or with what they refer to, or None; reads every byte.

    Raises:
        UnreadableError: they cannot be read, so that nothing is known of them.
    """
    if problem := _problem(path, whole=True):
        return problem
    try:
        with reading(path) as file:
            for name in names(file):
                if is_virtual(file[name]):
                    refuse_other_sources(file[name], _SOURCE)
                elif name != CLASS_NAMES:  # which nothing reads
                    open_stored(file, name)
    except CheckpointError as error:
        return str(error)
    return None


def find_truncation(path: Path) -> str | None:
    """Returns the problem with the head or the length of a file, or None; reads the head alone."""
    return _problem(path, whole=False)


def _problem(path: Path, whole: bool) -> str | None:
    try:
        expected = recorded_checksum(path)
        with _opened_bytes(path) as file:
            actual = Checksum(os.fstat(file.fileno()).st_size - _HEAD_BYTES, expected.crc32)
            if whole and actual.bytes == expected.bytes:
                actual = Checksum(*crc32_of_file(file.fileno(), _HEAD_BYTES))
    except CheckpointError as error:
        if whole and isinstance(error, UnreadableError):
            raise
        return str(error)
    if actual.bytes != expected.bytes:
        lengths = f"{actual.bytes + _HEAD_BYTES} bytes long, {expected.bytes + _HEAD_BYTES} were written"
        return f"{path} is damaged: {lengths}"
    if actual.crc32 != expected.crc32:
        return f"{path} is damaged: its CRC-32 is {actual.crc32:08x}, {expected.crc32:08x} was written"
    return None
