"""A file object through which HDF5 writes files that are too large to be made in memory.

HDF5's own drivers hold Python's global lock while they write, and its memory driver needs the content three times over.
With this object large writes go straight from the arrays to the file while other threads compute; small ones are
merged, because after each the thread may have to wait for the lock.
"""

import os
from collections.abc import Callable, Iterator

from pflmpi import atomic
from pflmpi.store.large_files import direct_io

_SMALL = 1 << 16


class Target:
    """The file-like interface that h5py needs; `finish` writes what is still buffered.

    Errors are hidden from HDF5, because it cannot close a file that it cannot write, and crashes on it at exit. After
    the first error nothing more is written.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = 0
        self._small: list[tuple[int, bytes]] = []  # (position, content) in the order of the writes
        self._error: BaseException | None = None

    def finish(self) -> None:
        """Write what is buffered, and raise the first error."""
        self._attempt(self._write_small)
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the beginning or the end of the file."""
        assert whence in (os.SEEK_SET, os.SEEK_END)
        self._position = offset + (os.fstat(self._descriptor).st_size if whence == os.SEEK_END else 0)
        return self._position

    def tell(self) -> int:
        """Current position."""
        return self._position

    def write(self, content: memoryview) -> int:
        """Write at the position and advance."""
        self._attempt(lambda: self._write(content))
        self._position += len(content)
        return len(content)

    def read(self, size: int) -> bytes:
        """Read at the position and advance; h5py requires a readable object."""
        self._attempt(self._write_small)
        found = os.pread(self._descriptor, size, self._position)
        self._position += len(found)
        return found

    def truncate(self, size: int) -> int:
        """Set the length of the file."""
        self._attempt(self._write_small)
        self._attempt(lambda: os.ftruncate(self._descriptor, size))
        return size

    def flush(self) -> None:
        """Do nothing: the file is flushed once, when complete."""

    def _attempt(self, step: Callable[[], None]) -> None:
        if self._error is None:
            try:
                step()
            except BaseException as error:
                self._error = error

    def _write(self, content: memoryview) -> None:
        if len(content) < _SMALL:
            self._small.append((self._position, bytes(content)))
        else:
            self._write_small()
            direct_io.write_at(self._descriptor, content, self._position)

    def _write_small(self) -> None:
        for start, end in _regions(self._small):
            # The gaps between the pieces are already in the file, or beyond its end.
            merged = bytearray(os.pread(self._descriptor, end - start, start).ljust(end - start, b"\0"))
            for position, content in self._small:
                if start <= position < end:
                    merged[position - start : position - start + len(content)] = content
            atomic.write_at(self._descriptor, merged, start)
        self._small.clear()


def _regions(pieces: list[tuple[int, bytes]]) -> Iterator[tuple[int, int]]:
    """Start and end of each region of neighbouring pieces."""
    start = end = -1
    for first, last in sorted((position, position + len(content)) for position, content in pieces):
        if start >= 0 and first > end + _SMALL:
            yield start, end
            start = -1
        start, end = (first, last) if start < 0 else (start, max(end, last))
    if start >= 0:
        yield start, end
