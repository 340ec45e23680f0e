"""The rounds of a run as they end, for a function of the user's."""

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

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

    Args:
        run: the folder, before the other process begins; a file of an earlier run is not read until it is replaced.
        done: rounds up to this one are not new.
    """

    def __init__(self, run: Path, done: int) -> None:
        self._path = metrics_file.path(run)
        self._file = self._now()
        self._begun = self._file is None
        self._last = done
        self._read = 0  # bytes
        self._columns: list[str] = []

    def __iter__(self) -> Iterator[Row]:
        """Those that have come since the last time."""
        now = self._now()
        if now != self._file:
            self._file, self._begun, self._read = now, True, 0
        if now is None or not self._begun:
            return
        with open(self._path, "rb") as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]  # the rest is being written
        lines = list(csv.reader(text.decode().splitlines()))
        if self._read == 0 and lines:
            self._columns = lines.pop(0)
        self._read += len(text)
        for values in lines:
            found = row(dict(zip(self._columns, values, strict=True)))
            if found["round"] > self._last:
                self._last = int(found["round"])
                yield found

    def _now(self) -> tuple[int, int] | None:
        """Which file it is: another one once it was replaced."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino
