"""RUN/partition.csv: number of samples of each class on every client."""

import io
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from zlib_ng import zlib_ng as zlib

from pflmpi import atomic, regular_file
from pflmpi.errors import CheckpointError
from pflmpi.text import for_shell

_HEADER = ("client", "class", "train", "test", "validation")  # the last only where there are validation samples
_AT_ONCE = 100_000  # lines
_MOST_CELLS = 1 << 16  # clients times classes per line, so that a small file cannot ask for much memory


@dataclass(frozen=True, eq=False)
class SampleCounts:
    """Samples by client and class."""

    train: np.ndarray  # [N, K] int64
    test: np.ndarray  # [N, K] int64
    validation: np.ndarray | None = None  # [N, K] int64; None where there are none at all

    @property
    def sides(self) -> dict[str, np.ndarray]:
        """The arrays [N, K] by split."""
        sides = {"train": self.train, "test": self.test}
        return sides if self.validation is None else {**sides, "validation": self.validation}


def path(run: Path) -> Path:
    return run / "partition.csv"


def write(run: Path, counts: SampleCounts) -> None:
    """Write a line for every client and class with samples.

    The line of the last client and class is always written: it tells N and K to readers.
    """
    atomic.write(path(run), _content(counts))


def checksum(counts: SampleCounts) -> str:
    """Computes the CRC-32 of the file with these counts."""
    return _checksum(_content(counts))


def find_damage(run: Path, expected: str) -> str | None:
    """Returns why the file is not the one with this checksum, or None."""
    try:
        content = regular_file.read(path(run))
    except OSError as error:
        return f"{path(run)} cannot be read: {error.strerror}; `pflmpi resume {for_shell(run)}` writes it anew"
    if _checksum(content) == expected:
        return None
    return (
        f"{path(run)} is not as it was written: its CRC-32 is another; `pflmpi resume {for_shell(run)}` writes it anew"
    )


def read(run: Path) -> SampleCounts | None:
    """Reads the samples of each client and class; None without the file, `CheckpointError` if it is damaged."""
    if not os.path.lexists(path(run)):
        return None
    try:
        header, _, lines = regular_file.read(path(run)).decode().partition("\n")
        names = header.split(",")
        if tuple(names) not in (_HEADER, _HEADER[:-1]) or not lines.strip():
            raise ValueError("it does not begin with " + ",".join(_HEADER[:-1]) + " and a line of numbers")
        table = np.loadtxt(io.StringIO(lines), np.int64, comments=None, delimiter=",", ndmin=2)
        shape = tuple(int(last) + 1 for last in table[-1, :2])
        if math.prod(shape) > _MOST_CELLS * len(table):
            raise ValueError(f"it names {shape[0]} clients and {shape[1]} classes in {len(table)} lines")
        sides = {name: np.zeros(shape, np.int64) for name in names[2:]}
        for name, values in zip(sides, table.T[2:], strict=True):
            sides[name][table[:, 0], table[:, 1]] = values
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path(run)} is damaged: {error}; copy it again, or delete it") from error
    return SampleCounts(**sides)


def _checksum(content: bytes) -> str:
    return f"crc32 {zlib.crc32(content):08x}"  # digits alone could be read as a number


def _content(counts: SampleCounts) -> bytes:
    present = np.sum([*counts.sides.values()], axis=0) > 0
    present[-1, -1] = True
    table = np.column_stack([*np.nonzero(present), *(samples[present] for samples in counts.sides.values())])
    parts = np.array_split(table, 1 + len(table) // _AT_ONCE)
    return b"".join([",".join((*_HEADER[:2], *counts.sides)).encode(), b"\n", *map(_lines, parts)])


def _lines(table: np.ndarray) -> bytes:
    """Formats whole numbers [n, C] as lines."""
    line = ",".join(["%d"] * table.shape[1]) + "\n"
    return (line * len(table) % tuple(table.ravel().tolist())).encode()
