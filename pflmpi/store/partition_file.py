"""RUN/partition.csv: number of samples of each class on every client, for later analysis."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pflmpi import atomic
from pflmpi.errors import CheckpointError

_HEADER = ("client", "class", "train", "test")


@dataclass(frozen=True, eq=False)
class Counts:
    """Samples by client and class.

    Attributes:
        train: [N, K] int64.
        test: [N, K] int64.
    """

    train: np.ndarray
    test: np.ndarray


def path(run: Path) -> Path:
    """The partition file of a run."""
    return run / "partition.csv"


def write(run: Path, counts: Counts) -> None:
    """Write a line for every client and class with samples.

    The line of the last client and class is always written, so that the numbers of both can be read back.
    """
    held = (counts.train + counts.test) > 0
    held[-1, -1] = True
    with atomic.replacing(path(run)) as descriptor, open(descriptor, "w", newline="", closefd=False) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_HEADER)
        for client, label in np.argwhere(held).tolist():
            writer.writerow((client, label, int(counts.train[client, label]), int(counts.test[client, label])))


def read(run: Path) -> Counts | None:
    """Samples of each client and class; None for a run without the file.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path(run).exists():
        return None
    try:
        with open(path(run), newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
        if not lines or tuple(lines[0]) != _HEADER:
            raise ValueError("its first line is not " + ",".join(_HEADER))
        table = np.array([[int(word) for word in line] for line in lines[1:]], np.int64)
        shape = tuple(table[-1, :2] + 1)
        train, test = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        train[table[:, 0], table[:, 1]], test[table[:, 0], table[:, 1]] = table[:, 2], table[:, 3]
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path(run)} is damaged: {error}; copy it again, or delete it") from error
    return Counts(train, test)
