"""Downloads: one process at a time, and one kind of error when they fail."""

import fcntl
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pflmpi.errors import DataError

# URLError and timeouts are OSErrors; a web page instead of a file ends in a bad archive, a wrong checksum, or an
# assertion in torchvision's parser.
FAILURES = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    AssertionError,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
)


@contextmanager
def downloading(name: str, root: Path) -> Iterator[None]:
    """Hold the download lock of a data folder, and turn the errors of a failed download into a `DataError`.

    Later ranks wait here, and then find the files in place.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / ".pflmpi-download.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"dataset {name!r} cannot be downloaded to {root} ({error}); set data.root to a writable folder"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    except FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"dataset {name!r} could not be downloaded to {root} ({reason}); "
            f"check the network, or copy the files there from a machine that has them and set data.download: false"
        ) from error
    finally:
        os.close(lock)
