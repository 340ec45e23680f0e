"""The folder of a run, tried as a run uses it: written, flushed, locked, shared by all ranks."""

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pflmpi.doctor.facts import Folder
from pflmpi.store.names import TEMPORARY
from pflmpi.text import first_line

_NAME = ".pflmpi-doctor"


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


@contextmanager
def beacon(folder: Path) -> Iterator[str]:
    """Give the name of a locked file in the folder, for the other ranks to look for; "" where there can be none."""
    path = existing(folder) / f"{_NAME}-{socket.gethostname()}-{os.getpid()}.shared"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError:
        yield ""
        return
    try:
        with contextlib.suppress(OSError):  # whether locks work is looked at elsewhere
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path.name
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def look(folder: Path, beacon: str) -> Folder:
    """Return what this rank can do in the folder.

    Args:
        beacon: the name of the file that rank 0 keeps there; "" if there is none.
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
    seen, lock_seen = _seen(place / beacon) if beacon else (None, None)
    free = shutil.disk_usage(place).free
    return Folder(path=str(place), flock=flock, hdf5=hdf5, seen=seen, lock_seen=lock_seen, free=free)


def flock_error(path: Path) -> str:
    """Return why a file cannot be locked; "" if it can."""
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.strerror or first_line(error)
    return ""


def hdf5_error(path: Path) -> str:
    """Return why HDF5 cannot write a file with its lock on it; "" if it can, or is not there to be asked."""
    try:
        from pflmpi.store.hdf5 import h5py
    except (ImportError, OSError):
        return ""
    try:
        # The environment variable HDF5_USE_FILE_LOCKING goes before what is asked for here.
        with h5py.File(path, "w", locking=True) as file:
            file["probe"] = 1
    except OSError as error:
        return first_line(error)
    return ""


def _seen(path: Path) -> tuple[bool, bool | None]:
    """Return whether the file is there, and whether somebody's lock on it is noticed; None if that cannot be tried."""
    try:
        with path.open("r+b") as file:
            # Shared, so that the ranks that try do not hold off one another.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False, None
    except BlockingIOError:
        return True, True
    except OSError:
        return True, None
    return True, False
