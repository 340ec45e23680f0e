"""What a checkpoint holds of metrics.csv, so that a damaged one is found and restored.

    RUN/shards/metrics.csv    a copy of the first lines of metrics.csv
    RUN/round_00012.h5        `history`: the lines after those, and the length and CRC-32 of all bytes before them

The copy gets the lines in a round file once these are longer than 8 KiB, so a round file is bounded and a run of T
rounds writes O(T). With the whole of metrics.csv in each, it wrote O(T^2): 231 kB in round 1,500. What was not chosen:

- The lines since the round file before: `checkpoint.keep` deletes that, and with it the only copy of its lines. Files
  that hold the last 1, 2, 1, 4, ... lines have the same need.
- Compression: most bytes are digits of seconds and accuracies; it changes the constant alone.
- A copy without lines in round files: it would have to be flushed in each round, once more than now.

The copy only grows, and before the record of the round that needs it, so all round files of a run share one. A single
damaged file is restored: metrics.csv from the copy, the copy from metrics.csv.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from zlib_ng import zlib_ng as zlib

from pflmpi import atomic, regular_file
from pflmpi.store import checked_hdf5
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.hdf5 import Group
from pflmpi.store.metrics import metrics_file
from pflmpi.store.names import SHARDS

LONGEST = 1 << 13  # bytes of lines in a round file, and one line more


class History(NamedTuple):
    """What a round file holds of metrics.csv.

    Attributes:
        lines: its last lines after the round, uint8; in files of formats 2 and 3 all.
        before: length and checksum of all bytes before them.
    """

    lines: np.ndarray
    before: Checksum


NO_HISTORY = History(np.empty(0, np.uint8), Checksum(0, 0))


def held(file: Group) -> History | None:
    """What an open round file holds; None in files of format 1, and where there were no lines."""
    if "history" not in file:
        return None
    before = Checksum(*(int(file["history"].attrs.get(f"{name}_before", 0)) for name in Checksum._fields))
    lines = checked_hdf5.get(file, "history")
    return History(lines, before) if len(lines) or before.bytes else None


class Recorder:
    """Knows on rank 0 what the next checkpoint holds of metrics.csv, of which `restart` has made the copy.

    Args:
        run: the folder.
    """

    def __init__(self, run: Path) -> None:
        self._lines, self._before = b"", checksum_of(metrics_file.text(run))

    def add(self, line: str) -> None:
        """A line was appended to metrics.csv."""
        self._lines += line.encode()

    def take(self) -> tuple[History, History | None]:
        """What a checkpoint holds, and what must be appended to the copy before it is written, if anything."""
        moved = None
        if len(self._lines) > LONGEST:
            moved = self._history()
            self._before = Checksum(self._before.bytes + len(self._lines), zlib.crc32(self._lines, self._before.crc32))
            self._lines = b""
        return self._history(), moved

    def _history(self) -> History:
        return History(np.frombuffer(self._lines, np.uint8), self._before)


def path(run: Path) -> Path:
    """The copy."""
    return run / SHARDS / metrics_file.path(run).name


def restart(run: Path, done: int) -> None:
    """Keep the lines of rounds 1 to `done` in metrics.csv, and copy them."""
    metrics_file.restart(run, done)
    atomic.write(path(run), metrics_file.text(run))


def extend(run: Path, moved: History) -> None:
    """Append lines to the copy; they are on disk afterwards.

    Raises:
        OSError: it could not be written; carries the name of the file.
    """
    try:
        descriptor = os.open(path(run), os.O_WRONLY | os.O_NOFOLLOW)
        try:
            atomic.write_at(descriptor, moved.lines.data, moved.before.bytes)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path(run))) from error


def whole(run: Path, recorded: History) -> bytes | None:
    """metrics.csv as a checkpoint recorded it; None if the lines before its own are neither there nor in the copy."""
    for found in (path(run), metrics_file.path(run)):
        if holds(found, recorded.before):
            return _first(found, recorded.before.bytes) + recorded.lines.tobytes()
    return None


def checksum(recorded: History) -> Checksum:
    """Length and checksum of metrics.csv as a checkpoint recorded it."""
    size = recorded.before.bytes + len(recorded.lines)
    return Checksum(size, zlib.crc32(recorded.lines.tobytes(), recorded.before.crc32))


def lost(run: Path, round: int) -> str:
    """Says that `whole` finds nothing."""
    return f"neither {metrics_file.path(run)} nor its copy {path(run)} is as round {round} recorded it"


def holds(found: Path, before: Checksum) -> bool:
    """Whether the first bytes of a file are those before the lines in a checkpoint."""
    return checksum_of(_first(found, before.bytes)) == before


def _first(found: Path, size: int) -> bytes:
    """The first bytes of a file; none where there is no such file."""
    try:
        with regular_file.opened(found) as file:
            return file.read(min(size, os.fstat(file.fileno()).st_size))
    except OSError:  # `whole` looks for another copy
        return b""


def checksum_of(text: bytes) -> Checksum:
    """Length and checksum of some bytes."""
    return Checksum(len(text), zlib.crc32(text))
