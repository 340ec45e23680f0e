"""Taking the lock of a run: made where there is none, replaced where its owner is gone, otherwise refused."""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from pflmpi import regular_file
from pflmpi.atomic import TEMPORARY, remedy
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.store import job_file
from pflmpi.store.lock.owner import Owner, read, write
from pflmpi.store.lock.run_lock import RunLock, path, token_of, touched

SILENCE = 60.0  # seconds after which an owner on another host is taken for gone
_SETTLED = 0.5  # seconds after which two that take over at once see each other
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

_log = logging.getLogger(__name__)


def take(run: Path, jobs: Mapping[str, int], take_over: bool, level: int = logging.WARNING) -> RunLock:
    """Take the lock of a run, making the folder if it is missing.

    Args:
        jobs: see `Owner`; the lock of the same job before its restart is taken over.
        take_over: also from a process that still runs.
        level: of the message that it was taken from another process.

    Raises:
        CheckpointError: another process writes the run; says which.
        ConfigError: the folder cannot be written.
    """
    try:
        made = not run.exists()
        run.mkdir(parents=True, exist_ok=True)
        regular_file.check_folders(run)
        me = Owner.here(run, jobs)
        _take(run, me, take_over, level)
        lock = RunLock(run, me.token, made)
        lock.keep()
        job_file.record_start(run, jobs)
    except OSError as error:
        cure = f"{remedy(error)}, or choose another folder"
        raise ConfigError(f"cannot write the run folder {run}: {error.strerror}; {cure}") from error
    return lock


def _take(run: Path, me: Owner, take_over: bool, level: int) -> None:
    lock = path(run)
    mine = lock.with_name(f"{lock.name}.{me.token}{TEMPORARY}")
    try:
        write(mine, me)
        while not _make(lock, mine, me):
            with contextlib.suppress(FileNotFoundError):  # it has just been released
                found = read(lock)
                reason = "as --take-over asks" if take_over else _gone(run, found, me, mine)
                if not reason:
                    raise _refusal(run, found, _silence(lock, mine))
                _log.log(level, "%s was written by %s; taken over: %s", run, found or "an unknown process", reason)
                return _put(lock, mine, me)
    finally:
        mine.unlink(missing_ok=True)


def _make(lock: Path, mine: Path, me: Owner) -> bool:
    """Make the lock; False if there is one."""
    try:
        os.link(mine, lock)
    except FileExistsError:
        return token_of(lock) == me.token  # a network file system may do it twice, and say so the second time
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if lock.exists():
            return False
        _put(lock, mine, me)
    return True


def _put(lock: Path, mine: Path, me: Owner) -> None:
    """Replace the lock; of two that do it at once, the first is refused."""
    os.replace(mine, lock)
    time.sleep(_SETTLED)
    if token_of(lock) != me.token:
        raise _refusal(lock.parent, read(lock), 0.0)


def _gone(run: Path, found: Owner | None, me: Owner, mine: Path) -> str:
    """Why the owner does not write the run any more; "" if it does. On another host, its touches are waited for."""
    if found is not None and ((reason := found.gone(run, me.jobs)) or found.near()):
        return reason
    lock = path(run)
    heard, silence = touched(lock), _silence(lock, mine)
    end = time.monotonic() + SILENCE - silence
    if silence < SILENCE:
        _log.warning("waiting up to %.0f s for a sign of %s, which writes %s", SILENCE - silence, found, run)
    while time.monotonic() < end:
        time.sleep(_SETTLED)
        if touched(lock) != heard:
            return ""
    return f"nothing was heard of it for {max(silence, SILENCE):.0f} s"


def _silence(lock: Path, mine: Path) -> float:
    """Seconds since the owner touched its lock, by the clock of the file system."""
    os.utime(mine)
    return max(touched(mine) - touched(lock), 0.0)


def _refusal(run: Path, found: Owner | None, silence: float) -> CheckpointError:
    return CheckpointError(
        f"{run} is being written by {found or 'an unknown process'}, last heard of {silence:.0f} s ago; wait for it, "
        "or end it and resume the run, or take the run from it with --take-over"
    )
