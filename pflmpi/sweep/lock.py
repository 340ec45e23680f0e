"""Who may work in the folder of a sweep: one sweep on the whole table, or many tasks, each on a cell of its own."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pflmpi.errors import ConfigError


@contextmanager
def locked(folder: Path, shared: bool = False) -> Iterator[int]:
    """Make a folder and hold its lock; gives the descriptor, which holds it for every process that has it open.

    Nothing is left of the lock once these processes have ended, in whatever way.

    Args:
        shared: leave room for others that share it, and keep out only those that do not.
    """
    busy = (
        f"another sweep works in {folder}, or a job array, or runs that a killed one has left behind "
        f"(`pgrep -af {folder}` shows those of this machine); wait for them, end them, or choose another --out"
    )
    with _held(folder / ".lock", fcntl.LOCK_SH if shared else fcntl.LOCK_EX, busy) as descriptor:
        yield descriptor


@contextmanager
def cell_locked(run: Path) -> Iterator[int]:
    """Hold the lock of one run in the folder of a sweep, as `locked` does; it lies beside the run."""
    busy = f"another task makes {run}, or what a killed one has left behind; wait for its end, or end it"
    with _held(run.with_name(f".{run.name}.lock"), fcntl.LOCK_EX, busy) as descriptor:
        yield descriptor


@contextmanager
def _held(path: Path, how: int, busy: str) -> Iterator[int]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(
            f"cannot write the sweep folder {path.parent}: {error.strerror}; choose another --out"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(busy) from error
        except OSError as error:
            raise ConfigError(
                f"cannot lock the sweep folder {path.parent}: {error.strerror}; choose another --out"
            ) from error
        yield descriptor
    finally:
        os.close(descriptor)
