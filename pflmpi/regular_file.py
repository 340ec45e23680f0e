"""Reads files of a run from an unknown source: regular files only, through no links, and of limited size.

A FIFO would block for ever, `/dev/zero` never end, and a link may lead out of the run. The folder of the run itself may
be reached by a link, but not those inside it.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_TEXT = 1 << 28  # bytes of a text file; metrics.csv has as many after a million rounds
# A file may be longer than its stored blocks: it may have holes, and some file systems compress.
_HOLES = 1 << 30  # bytes
_COMPRESSION = 1 << 10
_SHARDS = "shards"  # the only folder in a run
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def open_without_links(name: str, flags: int) -> int:
    """An `opener` for `open` that follows no link at the path itself."""
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)


def check(path: Path) -> int:
    """Check a file of a run, and return its length in bytes.

    Raises:
        OSError: it is missing, not a regular file, reached by a link within the run, or nearly all of it is a hole.
    """
    check_folder(path.parent)
    return _length(path, os.lstat(path))


def check_folder(folder: Path) -> None:
    """Raise `OSError` if a folder in a run is a link: files elsewhere would be read or written."""
    if folder.name == _SHARDS and folder.is_symlink():
        raise _refusal(folder, "it is a link, which may lead out of the run; put the folder itself there")


def check_folders(run: Path) -> None:
    """Check the folder in a run, before anything is written in it; raises as `check_folder`."""
    check_folder(run / _SHARDS)


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a run for reading; raises as `check`."""
    check_folder(path.parent)
    try:
        descriptor = os.open(path, _OPEN)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            _length(path, os.lstat(path))
        raise
    try:
        _length(path, os.fstat(descriptor))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read(path: Path, most: int = MOST_TEXT) -> bytes:
    """Read a file of a run; raises as `check`, and if it has more than `most` bytes."""
    with open_regular(path) as file:
        return read_some(file, path, most)


def read_some(file: BinaryIO, path: Path, most: int) -> bytes:
    """Read the rest of an open file, which may be a pipe; raises `OSError` if that is more than `most` bytes."""
    content = bytearray()
    while part := file.read(min(1 << 20, most + 1 - len(content))):
        content += part
        if len(content) > most:
            raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return bytes(content)


def _length(path: Path, status: os.stat_result) -> int:
    """Length of a file in bytes; raises as `check`."""
    if stat.S_ISLNK(status.st_mode):
        raise _refusal(path, "it is a link, which may lead out of the run; put the file itself there")
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory, and no regular file", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path, "it is no regular file")
    stored_bytes = 512 * status.st_blocks
    if status.st_size > _HOLES + _COMPRESSION * stored_bytes:
        raise _refusal(path, f"it is {status.st_size} bytes long, of which {stored_bytes} are stored")
    return status.st_size


def _refusal(path: Path, why: str) -> OSError:
    return OSError(errno.EINVAL, why, str(path))
