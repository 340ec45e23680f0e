"""The rounds of a run as they end, for a function of the user's."""

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from pflmpi.store import metrics_file

Row = dict[str, int | float]
OnRound = Callable[[Row], object]


def row(line: Mapping[str, object]) -> Row:
    """A line of metrics.csv as numbers; NaN where a round has no value."""
    return {
        name: int(str(value)) if metrics_file.is_count(name) else float(str(value) or "nan")
        for name, value in line.items()
    }


class NewRounds:
    """The lines that another process adds to the metrics file of a run, or writes anew.

    The file is held open: only while it is, no other one can have its number.

    Args:
        run: the folder, before the other process begins; a file of an earlier run is not read until it is replaced.
        done: rounds up to this one are not new.
    """

    def __init__(self, run: Path, done: int) -> None:
        self._path = metrics_file.path(run)
        self._file = self._opened()
        self._begun = self._file is None
        self._last = done
        self._read = 0  # bytes
        self._columns: list[str] = []

    def __enter__(self) -> "NewRounds":
        return self

    def __exit__(self, *error: object) -> None:
        self._replace_by(None)

    def __iter__(self) -> Iterator[Row]:
        """Those that have come since the last time."""
        if self._is_another():
            self._replace_by(self._opened())
            self._begun, self._read = True, 0
        if self._file is None or not self._begun:
            return
        self._file.seek(self._read)
        text = self._file.read()
        text = text[: text.rfind(b"\n") + 1]  # the rest is being written
        lines = list(csv.reader(text.decode().splitlines()))
        if self._read == 0 and lines:
            self._columns = lines.pop(0)
        self._read += len(text)
        for values in lines:
            line = row(dict(zip(self._columns, values, strict=True)))
            if line["round"] > self._last:
                self._last = int(line["round"])
                yield line

    def _is_another(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return self._file is None or not os.path.samestat(there, os.fstat(self._file.fileno()))

    def _opened(self) -> BinaryIO | None:
        try:
            return open(self._path, "rb")
        except FileNotFoundError:
            return None

    def _replace_by(self, file: BinaryIO | None) -> None:
        if self._file is not None:
            self._file.close()
        self._file = file
