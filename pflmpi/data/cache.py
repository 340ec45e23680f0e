"""Data is read once per node: the arrays are kept as .npy files that every rank maps into its memory.

    FOLDER/<source>-<key>/images.npy labels.npy official_test.npy [writers.npy] entry.json

The key covers source, paths, sizes and modification times of the raw files. An entry appears by rename and is
checked against its digest whenever it is opened, so that a damaged one is noticed and rebuilt.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pflmpi.data.dataset import Dataset, assemble, content_digest

logger = logging.getLogger(__name__)

VERSION = 1  # of the layout above
ARRAYS = ("images", "labels", "official_test", "writers")


def private_folder() -> Path:
    """Return this user's cache folder, made with mode 0700; `PermissionError` where somebody else made it."""
    folder = Path(tempfile.gettempdir()) / f"pflmpi-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # The temporary folder is everybody's: a link or a folder of another user there is not to be trusted.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to user {found.st_uid} or is a link")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def entry_name(source: str, files: list[Path]) -> str:
    """Return the name of the cache entry for raw files in their present state."""
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([VERSION, source, state]).encode()).hexdigest()
    return f"{source}-{key[:20]}"


def cached(source: str, files: list[Path], read: Callable[[], Dataset], folder: Path | None = None) -> Dataset:
    """Return the dataset from the cache, filling the cache first where it has no good entry.

    One process of a node reads; the others wait for it and map what it wrote. Where the cache cannot be written
    (a full or read-only disk) the data is kept in plain memory, which is logged.

    Args:
        source: name of the source.
        files: the raw files; they decide whether an entry is current.
        read: reads the raw files.
        folder: where the cache is; None for the user's own folder below the temporary one.
    """
    try:
        folder = private_folder() if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        entry = folder / entry_name(source, files)
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
    """Read, write the entry, and return it mapped; under the lock of the entry."""
    dataset = read()
    try:
        for leftover in entry.parent.glob(f"{entry.name}.tmp-*"):  # of a process that died: the lock is ours
            shutil.rmtree(leftover)
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
        try:
            _write(temporary, dataset)
            if entry.exists():  # damaged; who has mapped it keeps what is mapped
                shutil.rmtree(entry)
            temporary.rename(entry)
            _sync(entry.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        logger.warning("data cache not written, %r stays in memory: %s", source, error)
        return dataset
    return _open(entry, source) or dataset


def _write(folder: Path, dataset: Dataset) -> None:
    for name in ARRAYS:
        array = getattr(dataset, name)
        if array is not None:
            with (folder / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
    with (folder / "entry.json").open("w") as file:
        json.dump({"digest": dataset.digest, "num_classes": dataset.num_classes}, file)
        file.flush()
        os.fsync(file.fileno())


def _open(entry: Path, source: str) -> Dataset | None:
    """Return the entry with its images mapped, or None where there is none or it is damaged."""
    try:
        about = json.loads((entry / "entry.json").read_text())
        # np.asarray drops the memmap class and keeps the mapping: slices are then ordinary arrays.
        images = np.asarray(np.load(entry / "images.npy", mmap_mode="r", allow_pickle=False))
        labels, official_test = (np.load(entry / f"{name}.npy", allow_pickle=False) for name in ARRAYS[1:3])
        path = entry / "writers.npy"
        writers = np.load(path, allow_pickle=False) if path.exists() else None
        found = content_digest(images, labels, official_test, writers, about["num_classes"])
        if found != about["digest"]:
            raise ValueError(f"its digest is {found[:12]}, written was {about['digest'][:12]}")
        return assemble(source, images, labels, official_test, about["num_classes"], writers, about["digest"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        logger.warning("cache entry %s is damaged and is written anew: %s", entry, error)
        return None


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    # Released by the kernel when the process ends, however it ends.
    lock = os.open(entry.with_name(f"{entry.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
