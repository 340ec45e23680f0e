"""The folder of a run, tried as a run uses it (written, flushed, locked, shared), and the stale files in it."""

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

from pflmpi.atomic import TEMPORARY
from pflmpi.doctor.facts import Folder
from pflmpi.store.names import SHARDS, round_of
from pflmpi.text import first_line

_NAME = ".pflmpi-doctor"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_OFFSETS = (0, 512)  # where the HDF5 part of a file begins: without and with the line of `store.checked_hdf5` before it
_LOCK = ".lock"  # the name that `sweep.lock` gives
_LEVELS = 4  # a run of a sweep is three folders below the sweep's lock

Stamp = tuple[int, int]  # bytes and time stamp of a file


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if os.path.lexists(place))


@contextmanager
def probe_file(folder: Path) -> Iterator[str]:
    """Keep a locked file in the folder, for the other ranks to look for; gives its name, "" where none can be made."""
    path = existing(folder) / f"{_NAME}-{socket.gethostname()}-{os.getpid()}.shared"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError:
        yield ""
        return
    try:
        with contextlib.suppress(OSError):  # `inspect_folder` says whether locks work
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path.name
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def inspect_folder(folder: Path, shared: str) -> Folder:
    """What this rank can do in the folder.

    Args:
        shared: the name of rank 0's probe file, "" if there is none.
    """
    place = existing(folder)
    probe = place / f"{_NAME}-{socket.gethostname()}-{os.getpid()}{TEMPORARY}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Folder(path=str(place), error=error.strerror or first_line(error))
    try:
        flock, hdf5 = flock_error(probe), hdf5_error(probe)
    finally:
        probe.unlink(missing_ok=True)
    seen, lock_seen = _seen(place / shared) if shared else (None, None)
    free = shutil.disk_usage(place).free
    return Folder(path=str(place), flock=flock, hdf5=hdf5, seen=seen, lock_seen=lock_seen, free=free)


def flock_error(path: Path) -> str:
    """Why the system cannot lock a file; "" if it can."""
    error = _lock_error(path, fcntl.LOCK_EX)
    return "" if error is None else error.strerror or first_line(error)


def hdf5_error(path: Path) -> str:
    """Why HDF5 cannot write a file with its lock on it; "" if it can, or cannot be imported."""
    try:
        from pflmpi.store.hdf5 import h5py
    except (ImportError, OSError):
        return ""
    try:
        # The environment variable HDF5_USE_FILE_LOCKING overrides this argument.
        with h5py.File(path, "w", locking=True) as file:
            file["probe"] = 1
    except OSError as error:
        return first_line(error)
    return ""


def unfinished(folder: Path) -> dict[str, Stamp]:
    """Half-written files of the runs in the folder, with their stamps."""
    found = {}
    for path in _files(folder):
        if path.name.endswith((f".h5{TEMPORARY}", f"config.yaml{TEMPORARY}")):
            with contextlib.suppress(OSError):  # it was finished meanwhile
                stat = path.stat()
                found[str(path)] = (stat.st_size, stat.st_mtime_ns)
    return found


def stale_files(folder: Path, before: dict[str, Stamp]) -> dict[str, Any]:
    """Fields of `Folder` for what processes that are gone have left in it, and for the locks that are held.

    Args:
        before: `unfinished` some time ago; a file that has changed since then is being written, and so is one that a
            process of this host has open.
    """
    unchanged = [path for path, stamp in unfinished(folder).items() if before.get(path) == stamp]
    flagged = [str(path) for path in _files(folder) if round_of(path.name) is not None and _flag(path)]
    sweeps = [place / _LOCK for place in [folder, *folder.parents][:_LEVELS]]
    held = [str(path) for path in (folder.parent / f".{folder.name}{_LOCK}", *sweeps) if _is_held(path)]
    users = _processes([*unchanged, *flagged, *held])
    return {
        "unfinished": tuple(path for path in sorted(unchanged) if path not in users),
        "flagged": tuple(path for path in sorted(flagged) if path not in users),
        "locked": {path: tuple(sorted(users.get(path, ()))) for path in held},
    }


def _processes(paths: Collection[str]) -> dict[str, set[int]]:
    """The processes of this host that have the files open, as far as this user may see them."""
    found: dict[str, set[int]] = {}
    by_target = {os.path.realpath(path): path for path in paths}
    for process in Path("/proc").glob("[0-9]*") if paths else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    path = by_target.get(os.readlink(descriptor))
                    if path is not None:
                        found.setdefault(path, set()).add(int(process.name))
    return found


def _files(folder: Path) -> list[Path]:
    """What is in the folder of a run, or of a sweep: in the runs right below it, and in the shards of these."""
    patterns = ("*", "*/*", f"*/{SHARDS}/*")
    return [folder / name for pattern in patterns for name in glob(pattern, root_dir=folder, include_hidden=True)]


def _flag(path: Path) -> bool:
    """Whether the superblock says that the file is open for writing; only its versions 2 and 3 can."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(_OFFSETS[-1] + 12)
        for offset in _OFFSETS:
            block = head[offset : offset + 12]
            if block.startswith(_SIGNATURE) and len(block) == 12:
                return block[8] in (2, 3) and bool(block[11] & 1)
    return False


def _seen(path: Path) -> tuple[bool, bool | None]:
    """Whether a file is there, and whether the lock on it holds here; None if that is unknown."""
    error = _lock_error(path, fcntl.LOCK_SH)  # shared, so that the ranks that try do not lock each other out
    if error is None or isinstance(error, BlockingIOError):
        return True, error is not None
    return not isinstance(error, FileNotFoundError), None


def _is_held(path: Path) -> bool:
    return isinstance(_lock_error(path, fcntl.LOCK_EX), BlockingIOError)


def _lock_error(path: Path, kind: int) -> OSError | None:
    """Try to lock a file for a moment."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None
