"""Verifying files that processes of a node share: one does it, the others rely on that while it lives."""

import fcntl
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def once_per_node(lock: Path, files: Sequence[Path], load: Callable[[bool], T]) -> T:
    """What `load` gives for some files; its argument says whether they have to be verified.

    A process that has verified them, or has relied on another one's, holds the lock as long as what it loaded is in
    use. The kernel releases it when the process ends, however that ends.

    Args:
        lock: a file beside them, for this user alone.
        files: those that are verified; a changed size or time of one makes them unverified.
    """
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(held, 0)  # of processes that have ended
            known = b""
        except BlockingIOError:
            fcntl.flock(held, fcntl.LOCK_SH)  # once the first has verified
            known = os.pread(held, 2**16, 0) if os.fstat(held).st_uid == os.getuid() else b""
        state = repr([_state(path) for path in files]).encode()
        result = load(known != state)
        if known != state:
            os.ftruncate(held, os.pwrite(held, state, 0))
        fcntl.flock(held, fcntl.LOCK_SH)
    except BaseException:
        os.close(held)
        raise
    weakref.finalize(result, os.close, held)
    return result


def _state(path: Path) -> tuple[str, int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return path.name, found.st_size, found.st_mtime_ns, found.st_ino
