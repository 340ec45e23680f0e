"""RUN/lock.json: which process writes a run, so that no second one does.

It holds on any file system, also where `flock` does not reach other nodes: it is made by a hard link, which only one
process can make, and its owner touches it every few seconds. An owner whose process has ended is known at once on its
own host, elsewhere by its silence.
"""

import contextlib
import os
import threading
from pathlib import Path

from pflmpi import regular_file
from pflmpi.errors import RunError
from pflmpi.store.lock.owner import Owner, read

BEAT = 5.0  # seconds between two touches


class RunLock:
    """The lock as every rank of a run knows it; rank 0 keeps it.

    Args:
        token: of the owner.
        made: whether the folder was made for it; such a folder is removed again if it stays empty.
    """

    def __init__(self, run: Path, token: str, made: bool = False) -> None:
        self.token = token
        self._run, self._made = run, made
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self) -> None:
        """Be the owner from now on."""
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
        """Remove the lock, if this process keeps it, just before the process ends at once; from any thread."""
        if self._thread is not None:
            self._remove()

    def check(self) -> None:
        """Raise `RunError` if the run belongs to another process by now."""
        try:
            found = read(path(self._run))
        except FileNotFoundError:
            found = None
        except OSError:
            return  # a fault of the file system, which writing will show
        if found is not None and found.token == self.token:
            return
        if not self._run.is_dir():
            raise RunError(f"the folder {self._run} was moved or deleted while its run was writing; start again")
        who = f"was taken over by {found}" if found else "has no lock.json any more: it was taken over, or deleted"
        raise RunError(f"{self._run} {who}; this process ends here and writes nothing more")

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if token_of(path(self._run)) == self.token:
                path(self._run).unlink()
            if self._made:
                self._run.rmdir()

    def _beat(self) -> None:
        while not self._ending.wait(BEAT):
            with contextlib.suppress(OSError):
                if token_of(path(self._run)) == self.token:
                    os.utime(path(self._run))


def path(run: Path) -> Path:
    """The lock of a run."""
    return run / "lock.json"


def touched(file: Path) -> float:
    """When a file was last touched, in seconds since the epoch, by the clock of the file system."""
    with regular_file.opened(file) as opened:  # a network file system asks its server again when a file is opened
        return os.fstat(opened.fileno()).st_mtime


def owner(run: Path) -> Owner | None:
    """Who writes the run, as its lock says; None without one, and if that process is known to have ended."""
    try:
        found = read(path(run))
        return None if found is None or found.gone(run) else found
    except OSError:
        return None


def token_of(lock: Path) -> str | None:
    """Token of a lock; None if it is gone or damaged."""
    try:
        found = read(lock)
    except FileNotFoundError:
        return None
    return found.token if found else None
