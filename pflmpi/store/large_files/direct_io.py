"""Large writes past the page cache, which would take the processor from the training.

What a checkpoint writes is flushed at once and seldom read again, so a copy in the page cache is of little use. The
kernel wants whole blocks at aligned addresses for such a write (O_DIRECT): they come from a buffer of the thread.
"""

import contextlib
import fcntl
import mmap
import os
import threading

import numpy as np

from pflmpi import atomic

_BLOCK = 4096  # bytes; a multiple of the block of any disk
_BUFFER = 1 << 22  # bytes
_DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where the system has no such writes

_of_thread = threading.local()


def write_at(descriptor: int, content: bytes | bytearray | memoryview, position: int) -> None:
    """Write all of `content` at a position of a file, whole blocks past the page cache if the file system can."""
    rest = np.frombuffer(content, np.uint8)
    first = -position % _BLOCK  # bytes before the first whole block
    done = first + _write_blocks(descriptor, rest[first:], position + first)
    atomic.write_at(descriptor, rest[:first].data, position)
    atomic.write_at(descriptor, rest[done:].data, position + done)


def _write_blocks(descriptor: int, content: np.ndarray, position: int) -> int:
    """Write whole blocks past the page cache; how many bytes, from the first on, are written."""
    done, end = 0, len(content) // _BLOCK * _BLOCK
    if end == 0 or not _set_direct(descriptor, True):
        return 0
    try:
        with contextlib.suppress(OSError):  # the rest is written as ever, which says what is wrong, if anything is
            while done < end:
                part = content[done : min(done + _BUFFER, end)]
                block = _buffer()[: len(part)]
                block[:] = part
                done += os.pwrite(descriptor, block.data, position + done)
    finally:
        _set_direct(descriptor, False)
    return done


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Whether what is written from now on can go past the page cache, or through it again."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)
    except OSError:
        return False  # a file system without such writes
    return _DIRECT != 0


def _buffer() -> np.ndarray:
    """Memory at the beginning of a page, the same for all writes of a thread: new memory costs as much as a copy."""
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = np.frombuffer(mmap.mmap(-1, _BUFFER), np.uint8)
    found: np.ndarray = _of_thread.buffer
    return found
