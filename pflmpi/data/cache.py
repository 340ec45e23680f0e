"""The data cache: raw files are read once per node, and every rank maps the arrays from .npy files.

    FOLDER/<source>-<key>/images.npy labels.npy official_test.npy [writers.npy] entry.json

The folder is this user's own. The key covers source, paths, sizes and modification times of the raw files. An entry
appears by rename; its files must have the CRC-32 they were written with; any other entry is rebuilt.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from zlib_ng import zlib_ng as zlib

from pflmpi import atomic, machine
from pflmpi.data.dataset import Dataset, assemble
from pflmpi.errors import DataError

logger = logging.getLogger(__name__)

VERSION = 2  # of the layout above
ARRAYS = ("images", "labels", "official_test", "writers")


def read_cached(source: str, files: list[Path], read: Callable[[], Dataset], folder: str | None) -> Dataset:
    """Returns the dataset from the cache, filling the cache first if it has no intact entry.

    One process per node reads; the others wait for it and map what it wrote. If the cache cannot be written (a full or
    read-only disk), the data stays in memory, which is logged.

    Args:
        source: name of the source.
        files: the raw files; they decide whether an entry is current.
        read: reads the raw files.
        folder: of the cache; None for the user's own folder below the temporary one.

    Raises:
        ConfigError: others can write to that folder.
    """
    try:
        entry = machine.private_folder(folder) / _entry_name(source, files)
        dataset = _read_entry(entry, source)
        if dataset is not None:
            return dataset
        with _lock_entry(entry):
            dataset = _read_entry(entry, source)  # another process may have written it meanwhile
            return dataset if dataset is not None else _fill_entry(entry, source, read)
    except OSError as error:
        logger.warning("data cache not used, every rank keeps its own copy of %r in memory: %s", source, error)
        return read()


def _fill_entry(entry: Path, source: str, read: Callable[[], Dataset]) -> Dataset:
    """Reads the dataset, writes it to the entry and maps it from there; the caller holds the entry's lock."""
    dataset = read()
    try:
        for leftover in entry.parent.glob(f"{entry.name}.tmp-*"):  # of a process that died: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
        try:
            _write_entry(temporary, dataset)
            if entry.exists():  # damaged; existing mappings stay valid
                aside = entry.with_name(f"{temporary.name}-old")
                entry.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
            temporary.rename(entry)
            atomic.flush_folder(entry.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        logger.warning("data cache not written, %r stays in memory: %s", source, error)
        return dataset
    return _read_entry(entry, source) or dataset


def _entry_name(source: str, files: list[Path]) -> str:
    """Name of the cache entry for raw files in their present state."""
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([VERSION, source, state]).encode()).hexdigest()
    return f"{source}-{key[:20]}"


def _write_entry(folder: Path, dataset: Dataset) -> None:
    arrays = {name: array for name in ARRAYS if (array := getattr(dataset, name)) is not None}
    for name, array in arrays.items():
        with open(folder / f"{name}.npy", "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    checksums = {name: _crc32(folder / f"{name}.npy") for name in arrays}
    about = json.dumps({"digest": dataset.digest, "num_classes": dataset.num_classes, "crc32": checksums}).encode()
    atomic.write(folder / "entry.json", about + b"\n%08x" % zlib.crc32(about))


def _read_entry(entry: Path, source: str) -> Dataset | None:
    """Returns the dataset with its arrays memory-mapped; None if the entry is missing or damaged."""
    try:
        about, _, checksum = (entry / "entry.json").read_bytes().rpartition(b"\n")
        if checksum != b"%08x" % zlib.crc32(about):
            raise ValueError("entry.json has another CRC-32 than was written")
        values, arrays = json.loads(about), {}
        for name, expected in values["crc32"].items():
            if _crc32(entry / f"{name}.npy") != expected:
                raise ValueError(f"{name}.npy has another CRC-32 than was written")
            # np.asarray drops the memmap class and keeps the mapping: slices are then ordinary arrays.
            arrays[name] = np.asarray(np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False))
        images, labels, official_test = (arrays[name] for name in ARRAYS[:3])
        writers = arrays.get("writers")
        return assemble(source, images, labels, official_test, values["num_classes"], writers, values["digest"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, DataError) as error:
        logger.warning("cache entry %s is damaged and will be rewritten: %s", entry, error)
        return None


def _crc32(path: Path) -> int:
    """CRC-32 of a file. It is read, not mapped: mapped pages would count as memory of this process."""
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


@contextmanager
def _lock_entry(entry: Path) -> Iterator[None]:
    # Released by the kernel when the process ends, however it ends.
    lock = os.open(entry.with_name(f"{entry.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
