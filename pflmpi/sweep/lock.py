"""Locks in the folder of a sweep: exclusive for a sweep of the whole table, shared by tasks that run one cell each.

They guard what a sweep does around its runs: clearing folders, writing configurations and logs. Runs inherit them.
A run itself is guarded by `store.run_lock`, which has one owner.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pflmpi import regular_file
from pflmpi.atomic import explain_write_error
from pflmpi.errors import ConfigError


@contextmanager
def lock_sweep_folder(folder: Path, shared: bool = False) -> Iterator[int]:
    """Creates a folder and locks it; yields the descriptor.

    Processes that inherit the descriptor hold the lock too; it is released when all of them have ended, however.

    Args:
        shared: allow other shared locks.
    """
    busy = (
        f"another sweep works in {folder}, or a job array, or runs left behind by a killed one "
        f"(`pgrep -af {folder}` shows those on this machine); wait for them, end them, or choose another --out"
    )
    with _hold(folder / ".lock", fcntl.LOCK_SH if shared else fcntl.LOCK_EX, busy) as descriptor:
        yield descriptor


def is_sweeping(folder: Path) -> bool:
    """Whether a process sweeps a whole table in a folder, where its lock can be seen; a task of an array does not."""
    try:
        with regular_file.open_regular(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def lock_cell(run: Path) -> Iterator[int]:
    """Locks one run of a sweep, as `lock_sweep_folder` does its folder; the lock file is beside the run."""
    busy = f"another task works on {run}, or a process left behind by a killed one; wait for it, or end it"
    with _hold(run.with_name(f".{run.name}.lock"), fcntl.LOCK_EX, busy) as descriptor:
        yield descriptor


@contextmanager
def _hold(path: Path, operation: int, busy: str) -> Iterator[int]:
    with explain_write_error(f"the sweep folder {path.parent}", "choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with explain_write_error(f"a lock in the sweep folder {path.parent}", "choose another --out"):
            try:
                fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(busy) from error
        yield descriptor
    finally:
        os.close(descriptor)
