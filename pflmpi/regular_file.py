"""Files of a run, which may be a stranger's: regular files, no links, no more than a limit of them.

A FIFO would wait for ever, `/dev/zero` never end, and a link lead out of the run. The folder of the run itself may be
reached by a link, those in it may not.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_TEXT = 1 << 28  # bytes of a text file; metrics.csv of a million rounds has as many
_HOLES = 1 << 30  # bytes that a file system may keep without storing them, and
_PACKED = 1 << 10  # times as many as it stores: some compress what they store
_WITHIN = ("shards",)  # folders of a run
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def not_through_a_link(name: str, flags: int) -> int:
    """Opener of a file that is written, which must not lie where a link leads."""
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)


def check(path: Path) -> int:
    """Length of a file of a run, in bytes.

    Raises:
        OSError: it is missing, no regular file, reached by a link within the run, or hardly any of it is stored.
    """
    check_folder(path.parent)
    return _length(path, os.lstat(path))


def check_folder(folder: Path) -> None:
    """Raise `OSError` for a folder in a run that is a link, through which files elsewhere would be read or written."""
    if folder.name in _WITHIN and folder.is_symlink():
        raise _refusal(folder, "it is a link, which may lead out of the run; put the folder itself there")


def check_folders(run: Path) -> None:
    """Check all folders in a run, before anything is written in it; raises as `check_folder`."""
    for name in _WITHIN:
        check_folder(run / name)


def opened(path: Path) -> BinaryIO:
    """A file of a run, opened for reading; raises as `check`."""
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
    """All bytes of a file of a run; raises as `check`, and for more than a number of them."""
    with opened(path) as file:
        return read_some(file, path, most)


def read_some(file: BinaryIO, path: Path, most: int) -> bytes:
    """The rest of an open file, which may be a pipe; raises `OSError` for more than a number of bytes."""
    content = bytearray()
    while part := file.read(min(1 << 20, most + 1 - len(content))):
        content += part
        if len(content) > most:
            raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return bytes(content)


def _length(path: Path, status: os.stat_result) -> int:
    if stat.S_ISLNK(status.st_mode):
        raise _refusal(path, "it is a link, which may lead out of the run; put the file itself there")
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory, and no regular file", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path, "it is no regular file")
    stored = 512 * status.st_blocks
    if status.st_size > _HOLES + _PACKED * stored:
        raise _refusal(path, f"it is {status.st_size} bytes long, of which {stored} are stored")
    return status.st_size


def _refusal(path: Path, why: str) -> OSError:
    return OSError(errno.EINVAL, why, str(path))
