"""The data cache: raw files are read once per node, and every rank maps the arrays from .npy files.

    FOLDER/<source>-<key>/images.npy labels.npy official_test.npy [writers.npy] entry.json

The key covers source, paths, sizes and modification times of the raw files. An entry appears by rename and is
checked against its digest whenever it is opened, so a damaged one is detected and rebuilt.
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

from pflmpi import atomic
from pflmpi.data.dataset import Dataset, assemble, content_digest

logger = logging.getLogger(__name__)

VERSION = 1  # of the layout above
ARRAYS = ("images", "labels", "official_test", "writers")


def private_folder() -> Path:
    """This user's cache folder, created with mode 0700; `PermissionError` if another user owns it."""
    folder = Path(tempfile.gettempdir()) / f"pflmpi-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # The temporary folder is shared: a link or another user's folder there cannot be trusted.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to user {found.st_uid} or is a link")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def cached(source: str, files: list[Path], read: Callable[[], Dataset], folder: Path | None = None) -> Dataset:
    """The dataset from the cache, which is filled first if it has no intact entry.

    One process per node reads; the others wait for it and map what it wrote. If the cache cannot be written (a full or
    read-only disk), the data stays in memory, which is logged.

    Args:
        source: name of the source.
        files: the raw files; they decide whether an entry is current.
        read: reads the raw files.
        folder: of the cache; None for the user's own folder below the temporary one.
    """
    try:
        folder = private_folder() if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        entry = folder / _entry_name(source, files)
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
            shutil.rmtree(leftover)
        temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
        try:
            _write(temporary, dataset)
            if entry.exists():  # damaged; existing mappings stay valid
                shutil.rmtree(entry)
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
            with (folder / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
    with (folder / "entry.json").open("w") as file:
        json.dump({"digest": dataset.digest, "num_classes": dataset.num_classes}, file)
        file.flush()
        os.fsync(file.fileno())


def _open(entry: Path, source: str) -> Dataset | None:
    """The entry with its images mapped; None if there is none or it is damaged."""
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
        logger.warning("cache entry %s is damaged and will be rewritten: %s", entry, error)
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
