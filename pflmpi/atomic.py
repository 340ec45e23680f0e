"""Files that appear whole or not at all."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pflmpi.errors import ConfigError

TEMPORARY = ".tmp"  # suffix of a file that is being written

# Errors of network file systems that cannot flush directories; there the rename has to suffice.
_NO_FOLDER_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make the folder writable"),
    errno.ENOENT: "put the folder back that was moved or deleted",
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`)",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.EISDIR: "move that directory away",
}


@contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Yield the descriptor of an empty file that, at the end of the block, is flushed and renamed to `path`.

    Until then an existing file of that name is unchanged, and of several writers at once the last one's file stays. If
    the block or a later step fails, nothing is left behind.

    Raises:
        OSError: the file could not be written; carries its name.
    """
    name = f"{path.stem[:40]}.{secrets.token_hex(4)}{path.suffix[:8]}{TEMPORARY}"  # of at most 255 bytes
    temporary = path.with_name(name)
    try:
        path.parent.mkdir(exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                yield descriptor
                os.fsync(descriptor)
            finally:
                os.close(descriptor)  # some network file systems report a full disk only here
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


def write(path: Path, content: bytes) -> None:
    """Write a whole file; raises as `replacing` does."""
    with replacing(path) as descriptor:
        write_at(descriptor, content, 0)


def write_at(descriptor: int, content: bytes | bytearray | memoryview, position: int) -> None:
    """Write all of `content` at a position of a file; releases the GIL."""
    rest = memoryview(content)
    while rest:  # one call writes at most 2 GiB, and less when interrupted
        written = os.pwrite(descriptor, rest, position)
        rest, position = rest[written:], position + written


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FLUSH:
            raise
    finally:
        os.close(descriptor)


def read_earlier(path: Path, mark: str, otherwise: str) -> str:
    """Returns the text of a file that is about to be replaced; "" if there is none.

    Args:
        mark: a part of every text that pflmpi writes there.
        otherwise: advice for an error message.

    Raises:
        ConfigError: the file is the user's own: it has another text, without the mark.
    """
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    if text and mark not in text:
        raise ConfigError(f"{path} exists and is not known to be from pflmpi; {otherwise}, or move it away")
    return text


@contextmanager
def explain_write_error(what: object, otherwise: str) -> Iterator[None]:
    """Turn an `OSError` of writing `what` into a `ConfigError` with a remedy, or else the advice in `otherwise`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {what}: {error.strerror or error}; {remedy(error)}, or {otherwise}") from error


def remedy(error: OSError) -> str:
    """What to do so that a file can be written, for an error message."""
    return _REMEDIES.get(error.errno or 0, "fix that")
