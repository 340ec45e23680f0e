"""A file as HDF5 writes it through Python.

HDF5's own drivers hold Python's lock while they write, and its driver for memory needs the content three times over. So
HDF5 is given this object, whose writes go straight from the arrays to the file and let other threads compute meanwhile.
"""

import os

from pflmpi.store import atomic


class Target:
    """What h5py asks of an object that it writes a file to.

    Attributes:
        error: the first error of a write, whatever it is. HDF5 is not told, because it cannot close a file that it
            cannot write, and crashes on it at exit; what it writes afterwards is dropped, and the caller raises the error.
    """

    def __init__(self, descriptor: int) -> None:
        self.error: BaseException | None = None
        self._descriptor = descriptor
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the beginning or the end of the file."""
        assert whence in (os.SEEK_SET, os.SEEK_END)
        self._position = offset + (os.fstat(self._descriptor).st_size if whence == os.SEEK_END else 0)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def write(self, content: memoryview) -> int:
        """Write at the position and move on."""
        if self.error is None:
            try:
                atomic.write_at(self._descriptor, content, self._position)
            except BaseException as error:
                self.error = error
        self._position += len(content)
        return len(content)

    def read(self, size: int) -> bytes:
        """Read at the position and move on; h5py takes only objects that can read."""
        found = os.pread(self._descriptor, size, self._position)
        self._position += len(found)
        return found

    def truncate(self, size: int) -> int:
        """Set the length of the file."""
        if self.error is None:
            try:
                os.ftruncate(self._descriptor, size)
            except BaseException as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Do nothing: the file is flushed once, when it is whole."""
