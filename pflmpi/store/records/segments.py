"""The files that hold the records of a run: a few for each rank, however many rounds there are."""

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pflmpi import atomic
from pflmpi.errors import RunError
from pflmpi.store.records import record
from pflmpi.store.records.record import Place, Record

_NAME = re.compile(r"round_(\d{5,})_rank_(\d{3,})\.rec")
_LONG = 1 << 24  # bytes after which a file is not continued, so that it can be deleted
_MANY = 64  # records after which it is not
_PATIENCE = 300.0  # seconds to wait for another process that turns records into HDF5
_LOOK = 0.05
_LOCK = "lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def folder(run: Path) -> Path:
    """Where the records of a run are."""
    return run / "records"


class RecordFile:
    """What one rank writes its records to; a new file begins now and then.

    Args:
        run: the folder of the run.
        rank: of this process.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self._run, self._rank = run, rank
        self._path: Path | None = None
        self._size = self._count = 0

    def append(self, new: Record) -> None:
        """Write a record; it is on disk afterwards.

        Raises:
            OSError: it could not be written; carries the name of the file, which is as before.
        """
        begins = self._size == 0 or self._size >= _LONG or self._count >= _MANY
        if self._path is None or begins:
            self._path = folder(self._run) / f"round_{new.round:05d}_rank_{self._rank:03d}.rec"
            self._size = self._count = 0
        try:
            if begins and not self._path.parent.is_dir():
                self._path.parent.mkdir(exist_ok=True)
                atomic.flush_folder(self._run)
            flags = os.O_CREAT | os.O_TRUNC if begins else 0
            descriptor = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o666)
            try:
                self._write(descriptor, new)
            finally:
                os.close(descriptor)  # some network file systems report a full disk only here
            if begins:
                atomic.flush_folder(self._path.parent)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(self._path)) from error

    def _write(self, descriptor: int, new: Record) -> None:
        try:
            end = record.write(descriptor, record.pack(new), self._size)
            os.fdatasync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._size)
            raise
        self._size, self._count = end, self._count + 1


@dataclass(frozen=True)
class Segment:
    """A file with records of one rank.

    Attributes:
        path: of the file.
        rank: whose.
        places: of the records in it, in ascending order of rounds.
    """

    path: Path
    rank: int
    places: tuple[Place, ...]

    def read(self, place: Place) -> Record | None:
        """One of its records; None if it is damaged or gone."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return record.read(descriptor, place)
        finally:
            os.close(descriptor)


def segments(run: Path, rank: int | None = None) -> list[Segment]:
    """The files of a run, or of one rank, by rank and then by round; their records are not yet read."""
    names = sorted(os.listdir(folder(run))) if folder(run).is_dir() else []
    numbers = [(int(match[2]), int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
    found = []
    for its, _, name in sorted(numbers):
        if rank not in (None, its):
            continue
        path = folder(run) / name
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                places = record.places(descriptor)
            finally:
                os.close(descriptor)
            found.append(Segment(path, its, tuple(places)))
    return found


def any_there(run: Path) -> bool:
    """Whether a run has records."""
    try:
        return any(_NAME.fullmatch(name) for name in os.listdir(folder(run)))
    except (FileNotFoundError, NotADirectoryError):
        return False


def recorded(run: Path) -> list[int]:
    """Rounds that rank 0 has recorded, ascending; whether they are complete is not checked.

    Raises:
        OSError: a file cannot be read.
    """
    return [place.round for one in segments(run, rank=0) for place in one.places]


def clear(run: Path) -> None:
    """Delete the records of a run, which nobody writes any more.

    Raises:
        OSError: a file could not be deleted.
    """
    where = folder(run)
    for path in sorted(where.glob("*.rec")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process looks at it at this moment
        (where / _LOCK).unlink(missing_ok=True)
        where.rmdir()


@contextmanager
def exclusive(run: Path) -> Iterator[None]:
    """Keep other processes of this system from turning the records into HDF5 meanwhile.

    A process on another node, where the file system has no locks, is held back by the lock of the run alone.

    Raises:
        RunError: another process does it, and does not come to an end.
        OSError: the folder cannot be written.
    """
    descriptor = os.open(folder(run) / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        end = time.monotonic() + _PATIENCE
        while not _locked(descriptor):
            if time.monotonic() > end:
                raise RunError(f"another process turns the records of {run} into HDF5; wait for it, or end it")
            time.sleep(_LOOK)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
