"""RUN/lock.json: which process writes a run, so that no second one does.

It works on any file system, also where `flock` does not reach other nodes: it is created by a hard link, which only
one process can make, and its owner touches it every few seconds. On the owner's host a process that has ended is
detected at once, on other hosts by a lock that is no longer touched. A lock is created where there is none and replaced
where its owner is gone; otherwise the run is refused.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pflmpi import regular_file
from pflmpi.atomic import TEMPORARY, explain_write_error
from pflmpi.errors import CheckpointError, RunError
from pflmpi.machine import has_ended, identify_system, read_start
from pflmpi.store import job_file
from pflmpi.store.job_file import End

BEAT = 5.0  # seconds between two touches
SILENCE = 60.0  # seconds without a touch after which an owner on another host counts as gone
_SETTLED = 0.5  # seconds after which two processes that take over at once see each other
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """The process that writes a run."""

    token: str  # random, unique to this lock
    host: str
    process: int  # process id
    system: str  # boot and process namespace in which the process id is valid; "" where unknown
    started: int  # when the process started, in clock ticks after the boot
    since: int  # when the lock was taken, in seconds since the epoch
    jobs: Mapping[str, int]  # restarts of each job that restarts the process: {"Slurm job 77": 1}
    folder: int  # inode of the run folder; a copied folder has another

    @classmethod
    def here(cls, run: Path, jobs: Mapping[str, int]) -> "Owner":
        """This process, as the owner of a run, with a new token."""
        pid, inode, token = os.getpid(), run.stat().st_ino, secrets.token_hex(8)
        return cls(token, socket.gethostname(), pid, identify_system(), read_start(pid), int(time.time()), jobs, inode)

    def why_gone(self, run: Path, jobs: Mapping[str, int] | None = None) -> str:
        """Returns why the process is known not to write this run any more; "" if it does, or if nothing is known.

        Args:
            jobs: those of this process; see `Owner.jobs`.
        """
        if self.folder != run.stat().st_ino:
            return "its lock was copied with the folder"
        for job, restarts in (jobs or {}).items():
            if self.jobs.get(job, restarts) < restarts:
                return f"{job} was restarted since"
        ended = self.near() and has_ended(self.process, self.started)
        return "that process has ended" if ended else ""

    def near(self) -> bool:
        """Whether the owner runs on this system, so that `why_gone` knows whether it has ended."""
        return self.system != "" and self.system == identify_system()

    def __str__(self) -> str:
        jobs = "".join(f", {job}" for job in self.jobs)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.process} on {self.host}{jobs} since {since}"


_OWNER = TypeAdapter(Owner)


def _read(file: Path) -> Owner | None:
    """Reads the owner that a lock names; None if the lock is damaged, `OSError` if it cannot be read."""
    try:
        owner = _OWNER.validate_json(regular_file.read(file))
    except ValidationError:
        return None
    return owner if 0 < owner.process < 1 << 31 and 0 <= owner.since < 1 << 40 else None


class RunLock:
    """The lock of a run; rank 0 keeps it, the other ranks check it.

    Args:
        made_folder: whether the run folder was created with it; such a folder is removed again if it stays empty.
    """

    def __init__(self, run: Path, token: str, made_folder: bool = False) -> None:
        self.token = token
        self._run, self._made_folder = run, made_folder
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self) -> None:
        """Touch the lock every few seconds from now on."""
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Remove the lock, if this process keeps it."""
        if self._thread is None:
            return
        self._ending.set()
        self._thread.join()
        self._thread = None
        self._remove()

    def drop(self) -> None:
        """Remove the lock, if this process keeps it, just before the process exits; can be called from any thread."""
        if self._thread is not None:
            self._remove()

    def check(self) -> None:
        """Raise `RunError` if another process has taken over the run."""
        try:
            owner = _read(path(self._run))
        except FileNotFoundError:
            owner = None
        except OSError:
            return  # a fault of the file system, which writing will show
        if owner is not None and owner.token == self.token:
            return
        if not self._run.is_dir():
            raise RunError(f"the folder {self._run} was moved or deleted while its run was writing; start again")
        who = f"was taken over by {owner}" if owner else "has no lock.json any more: it was taken over, or deleted"
        raise RunError(f"{self._run} {who}; this process ends here and writes nothing more")

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if read_token(path(self._run)) == self.token:
                path(self._run).unlink()
            if self._made_folder:
                self._run.rmdir()

    def _beat(self) -> None:
        while not self._ending.wait(BEAT):
            with contextlib.suppress(OSError):
                if read_token(path(self._run)) == self.token:
                    os.utime(path(self._run))


def path(run: Path) -> Path:
    return run / "lock.json"


def read_mtime(file: Path) -> float:
    """Returns when a file was last touched, in seconds since the epoch, by the clock of the file system."""
    with regular_file.open_regular(file) as opened:  # a network file system asks its server again when a file is opened
        return os.fstat(opened.fileno()).st_mtime


def find_owner(run: Path) -> Owner | None:
    """Returns who writes the run according to its lock; None without a lock, or if that process is known to be gone."""
    try:
        writer = _read(path(run))
        return None if writer is None or writer.why_gone(run) else writer
    except OSError:
        return None


def find_blocking_owner(run: Path, jobs: Mapping[str, int]) -> Owner | None:
    """As `find_owner`, but None where `take` with these jobs would replace the lock, as of an owner on a lost host."""
    lock, draft = path(run), run / f"lock.json.{secrets.token_hex(8)}{TEMPORARY}"
    if (writer := find_owner(run)) is None or writer.near():
        return writer
    try:
        draft.touch()
        return None if writer.why_gone(run, jobs) or _silence(lock, draft) > SILENCE else writer
    except OSError:
        return writer
    finally:
        draft.unlink(missing_ok=True)


def read_token(lock: Path) -> str | None:
    """Reads the token of a lock; None if the lock is missing or damaged."""
    try:
        owner = _read(lock)
    except FileNotFoundError:
        return None
    return owner.token if owner else None


def take(run: Path, jobs: Mapping[str, int], take_over: bool) -> RunLock:
    """Take the lock of a run, making the folder if it is missing.

    Args:
        jobs: see `Owner`; a lock that the same job took before its restart is replaced.
        take_over: whether to replace the lock of a process that still runs.

    Raises:
        CheckpointError: another process writes the run; says which.
        ConfigError: the folder cannot be written.
    """
    with explain_write_error(f"the run folder {run}", "choose another folder"):
        made_folder = not run.exists()
        run.mkdir(parents=True, exist_ok=True)
        regular_file.check_folders(run)
        me = Owner.here(run, jobs)
        _take(run, me, take_over)
        lock = RunLock(run, me.token, made_folder)
        lock.keep()
        return lock


def _take(run: Path, me: Owner, take_over: bool) -> None:
    lock = path(run)
    draft = lock.with_name(f"{lock.name}.{me.token}{TEMPORARY}")
    try:
        draft.write_text(json.dumps(dataclasses.asdict(me)) + "\n")
        while not _create(lock, draft, me):
            with contextlib.suppress(FileNotFoundError):  # it has just been released
                owner = _read(lock)
                reason = "as --take-over asks" if take_over else _wait_for_owner(run, owner, me, draft)
                if not reason:
                    raise _refusal(run, owner, _silence(lock, draft))
                _log.warning("%s was written by %s; taken over: %s", run, owner or "an unknown process", reason)
                if owner is not None:  # which did not record its own end
                    ended = time.time() - _silence(lock, draft)  # by the clock of hosts, as its `Start`
                    job_file.record(run, owner.jobs, End(owner.token, ended))
                return _replace(lock, draft, me)
    finally:
        draft.unlink(missing_ok=True)


def _create(lock: Path, draft: Path, me: Owner) -> bool:
    """Create the lock; returns False if there is one."""
    try:
        os.link(draft, lock)
    except FileExistsError:
        return read_token(lock) == me.token  # a network file system may repeat the call, and report the second one
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if lock.exists():
            return False
        _replace(lock, draft, me)
    return True


def _replace(lock: Path, draft: Path, me: Owner) -> None:
    """Replace the lock; of two processes that do so at once, the first is refused."""
    os.replace(draft, lock)
    time.sleep(_SETTLED)
    if read_token(lock) != me.token:
        raise _refusal(lock.parent, _read(lock), 0.0)


def _wait_for_owner(run: Path, owner: Owner | None, me: Owner, draft: Path) -> str:
    """Returns why the owner does not write the run any more, or "" if it does; waits for one on another host."""
    if owner is not None and ((reason := owner.why_gone(run, me.jobs)) or owner.near()):
        return reason
    lock = path(run)
    last_touch, silence = read_mtime(lock), _silence(lock, draft)
    end = time.monotonic() + SILENCE - silence
    if silence < SILENCE:
        _log.warning("waiting up to %.0f s for a sign of %s, which writes %s", SILENCE - silence, owner, run)
    while time.monotonic() < end:
        time.sleep(_SETTLED)
        if read_mtime(lock) != last_touch:
            return ""
    return f"nothing was heard of it for {max(silence, SILENCE):.0f} s"


def _silence(lock: Path, draft: Path) -> float:
    """Returns the seconds since the owner touched its lock, by the clock of the file system."""
    os.utime(draft)
    return max(read_mtime(draft) - read_mtime(lock), 0.0)


def _refusal(run: Path, owner: Owner | None, silence: float) -> CheckpointError:
    return CheckpointError(
        f"{run} is being written by {owner or 'an unknown process'}, last heard of {silence:.0f} s ago; wait for it, "
        "or end it and resume the run, or take the run from it with --take-over"
    )
