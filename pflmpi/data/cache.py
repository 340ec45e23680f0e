"""The data cache: raw files are read once per node, and every rank maps the arrays from .npy files.

    FOLDER/<source>-<key>/images.npy labels.npy official_test.npy [writers.npy] entry.json

The folder is this user's own. The key covers source, paths, sizes and modification times of the raw files. An entry
appears by rename; its content must have the digest it was written with, which one process of a node computes whenever
it is opened; any other entry is rebuilt.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from pflmpi import atomic, machine
from pflmpi.data.dataset import Dataset, assemble, content_digest
from pflmpi.errors import DataError

T = TypeVar("T")


def _once_per_node(lock: Path, files: Sequence[Path], load: Callable[[bool], T]) -> T:
    """What `load` gives for some files; its argument says whether they have to be verified.

    A process that has verified them, or has relied on another one's, holds the lock as long as what it loaded is in
    use. The kernel releases it when the process ends, however that ends.

    Args:
        lock: a file beside them, for this user alone.
        files: those that are verified; a changed size or time of one makes them unverified.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)  # of processes that have ended
            verified = b""
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # once the first has verified
            verified = os.pread(descriptor, 2**16, 0) if os.fstat(descriptor).st_uid == os.getuid() else b""
        state = repr([_state(path) for path in files]).encode()
        result = load(verified != state)
        if verified != state:
            os.ftruncate(descriptor, os.pwrite(descriptor, state, 0))
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(result, os.close, descriptor)
    return result


def _state(path: Path) -> tuple[str, int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return path.name, status.st_size, status.st_mtime_ns, status.st_ino


logger = logging.getLogger(__name__)

VERSION = 1  # of the layout above
ARRAYS = ("images", "labels", "official_test", "writers")


def cached(source: str, files: list[Path], read: Callable[[], Dataset], folder: str | None = None) -> Dataset:
    """The dataset from the cache, which is filled first if it has no intact entry.

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
        dataset = _open(entry, source)
        if dataset is not None:
            return dataset
        with _locked(entry):
            dataset = _open(entry, source)  # another process may have written it meanwhile
            return dataset if dataset is not None else _fill(entry, source, read)
    except OSError as error:
        logger.warning("data cache not used, every rank keeps its own copy of %r in memory: %s", source, error)
        return read()


def _fill(entry: Path, source: str, read: Callable[[], Dataset]) -> Dataset:
    """The dataset, read and written to the entry, then mapped from it; the caller holds the entry's lock."""
    dataset = read()
    try:
        for leftover in entry.parent.glob(f"{entry.name}.tmp-*"):  # of a process that died: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
        try:
            _write(temporary, dataset)
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
    return _open(entry, source) or dataset


def _entry_name(source: str, files: list[Path]) -> str:
    """Name of the cache entry for raw files in their present state."""
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([VERSION, source, state]).encode()).hexdigest()
    return f"{source}-{key[:20]}"


def _write(folder: Path, dataset: Dataset) -> None:
    for name in ARRAYS:
        array = getattr(dataset, name)
        if array is not None:
            with open(folder / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
    with open(folder / "entry.json", "w") as file:
        json.dump({"digest": dataset.digest, "num_classes": dataset.num_classes}, file)
        file.flush()
        os.fsync(file.fileno())


def _open(entry: Path, source: str) -> Dataset | None:
    """The entry with its images mapped; None if there is none or it is damaged."""
    if not entry.is_dir():
        return None
    files = [entry / "entry.json", *(entry / f"{name}.npy" for name in ARRAYS)]
    try:
        lock = entry.with_name(f"{entry.name}.verified")
        return _once_per_node(lock, files, lambda verify: _load(entry, source, verify))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, DataError) as error:
        logger.warning("cache entry %s is damaged and will be rewritten: %s", entry, error)
        return None


def _load(entry: Path, source: str, verify: bool) -> Dataset:
    about = json.loads((entry / "entry.json").read_text())
    images, labels, official_test = (_mapped(entry / f"{name}.npy") for name in ARRAYS[:3])
    writers = _mapped(entry / "writers.npy") if (entry / "writers.npy").exists() else None
    if verify:
        digest = content_digest(images, labels, official_test, writers, about["num_classes"])
        if digest != about["digest"]:
            raise ValueError(f"its digest is {digest[:12]}, written was {about['digest'][:12]}")
    return assemble(source, images, labels, official_test, about["num_classes"], writers, about["digest"])


def _mapped(path: Path) -> np.ndarray:
    """An array mapped from its file."""
    # np.asarray drops the memmap class and keeps the mapping: slices are then ordinary arrays.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    # Released by the kernel when the process ends, however it ends.
    lock = os.open(entry.with_name(f"{entry.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
