"""Files that appear whole or not at all."""

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from pflmpi.store.names import TEMPORARY

# Directories cannot be flushed on some network file systems; there the rename is as good as it gets.
_NO_FOLDER_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}


def write(path: Path, parts: Iterable[bytes | bytearray]) -> None:
    """Write a file by write, flush, rename, flush of the folder; a file of that name is replaced in the last step.

    The bytes are written by `os.write`, which lets other threads compute meanwhile.

    Raises:
        OSError: it could not be written, with the name of the file; what was there before is untouched, and nothing
            is left behind.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        path.parent.mkdir(exist_ok=True)
        try:
            _fill(temporary, parts)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        flush_folder(path.parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror or os.strerror(error.errno), str(path)) from error


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, where the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FLUSH:
            raise
    finally:
        os.close(descriptor)


def _fill(path: Path, parts: Iterable[bytes | bytearray]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:  # one call writes 2 GiB at most, and less when it is interrupted
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)  # some network file systems report a full disk only here
