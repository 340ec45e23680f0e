"""Direct I/O (O_DIRECT): large writes that bypass the page cache.

What a checkpoint writes is flushed at once and seldom read again, so copying it into the page cache only takes the
processor from the training. Direct I/O needs aligned blocks in aligned memory: they come from a buffer of the thread.
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
_LEAST = 1 << 20  # bytes; of less it takes more of the processor than the page cache, as each write waits for the disk
_DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where the system has no direct I/O

_thread_local = threading.local()


def write_at(descriptor: int, content: bytes | bytearray | memoryview, position: int) -> None:
    """Write all of `content` at a position of a file; if it is large, its whole blocks by direct I/O where possible."""
    rest = np.frombuffer(content, np.uint8)
    first = -position % _BLOCK  # bytes before the first whole block
    done = first + _write_blocks(descriptor, rest[first:], position + first)
    atomic.write_at(descriptor, rest[:first].data, position)
    atomic.write_at(descriptor, rest[done:].data, position + done)


def _write_blocks(descriptor: int, content: np.ndarray, position: int) -> int:
    """Write whole blocks by direct I/O; how many bytes, from the first on, are written."""
    done, end = 0, len(content) // _BLOCK * _BLOCK
    if end < _LEAST or not _set_direct(descriptor, True):
        return 0
    try:
        # The caller writes the rest, and meets the error again unless direct I/O caused it.
        with contextlib.suppress(OSError):
            while done < end:
                part = content[done : min(done + _BUFFER, end)]
                block = _buffer()[: len(part)]
                block[:] = part
                done += os.pwrite(descriptor, block.data, position + done)
    finally:
        _set_direct(descriptor, False)
    return done


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Turn direct I/O on or off for a file; whether the system and the file system support it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)
    except OSError:
        return False
    return _DIRECT != 0


def _buffer() -> np.ndarray:
    """Memory at the beginning of a page, the same for all writes of a thread: new memory costs as much as a copy."""
    if not hasattr(_thread_local, "buffer"):
        _thread_local.buffer = np.frombuffer(mmap.mmap(-1, _BUFFER), np.uint8)
    found: np.ndarray = _thread_local.buffer
    return found
