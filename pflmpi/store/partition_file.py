"""RUN/partition.csv: number of samples of each class on every client, for later analysis."""

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from zlib_ng import zlib_ng as zlib

from pflmpi import atomic, regular_file
from pflmpi.errors import CheckpointError
from pflmpi.text import for_shell

_HEADER = ("client", "class", "train", "test", "validation")  # the last where there are such samples


@dataclass(frozen=True, eq=False)
class SampleCounts:
    """Samples by client and class.

    Attributes:
        train: [N, K] int64.
        test: [N, K] int64.
        validation: [N, K] int64; None where there are none at all.
    """

    train: np.ndarray
    test: np.ndarray
    validation: np.ndarray | None = None

    @property
    def sides(self) -> dict[str, np.ndarray]:
        """[N, K] by what the samples are for."""
        sides = {"train": self.train, "test": self.test}
        return sides if self.validation is None else {**sides, "validation": self.validation}


def path(run: Path) -> Path:
    """The partition file of a run."""
    return run / "partition.csv"


def write(run: Path, counts: SampleCounts) -> None:
    """Write a line for every client and class with samples.

    The line of the last client and class is always written, so that the numbers of both can be read back.
    """
    atomic.write(path(run), _content(counts))


def checksum(counts: SampleCounts) -> str:
    """CRC-32 of the file with these counts."""
    return _checksum(_content(counts))


def damage(run: Path, expected: str) -> str | None:
    """Why the file is not the one with this checksum, or None."""
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
    """Samples of each client and class; None for a run without the file.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not os.path.lexists(path(run)):
        return None
    try:
        text = io.StringIO(regular_file.read(path(run)).decode(), newline="")
        lines = list(csv.reader(text))
        if not lines or tuple(lines[0]) not in (_HEADER, _HEADER[:-1]):
            raise ValueError("its first line is not " + ",".join(_HEADER[:-1]))
        table = np.array([[int(word) for word in line] for line in lines[1:]], np.int64)
        shape = tuple(table[-1, :2] + 1)
        sides = {name: np.zeros(shape, np.int64) for name in lines[0][2:]}
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
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_HEADER[:2], *counts.sides))
    for client, label in np.argwhere(present).tolist():
        writer.writerow((client, label, *(int(samples[client, label]) for samples in counts.sides.values())))
    return text.getvalue().encode()
