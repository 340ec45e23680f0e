"""RUN/metrics.csv: one line per round, and none of a round that a continuation will run again."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from pflmpi.errors import RunError

COLUMNS = (
    "round",
    "participants",
    "accuracy_mean",
    "accuracy_weighted",
    "accuracy_std",
    "up_bytes",
    "down_bytes",
    "wire_up_bytes",
    "wire_down_bytes",
    "seconds",
    "compute_seconds",
    "exchange_seconds",
    "evaluation_seconds",
    "checkpoint_seconds",
)


def path(run: Path) -> Path:
    """Return where the metrics of a run are."""
    return run / "metrics.csv"


def read(run: Path) -> list[dict[str, str]]:
    """Return the complete lines of the file, one mapping from column to text for each round."""
    if not path(run).exists():
        return []
    text = path(run).read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # a killed process may leave half a line
    return [row for row in csv.DictReader(lines) if None not in row.values()]


def restart(run: Path, done: int) -> None:
    """Keep the lines of rounds 1 to `done` and drop the rest; makes the file where there is none."""
    kept = [row for row in read(run) if int(row["round"]) <= done]
    temporary = path(run).with_suffix(".tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path(run))


def append(run: Path, line: Sequence[str | int]) -> None:
    """Add the line of a round, one value for each column."""
    assert len(line) == len(COLUMNS)
    try:
        with open(path(run), "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(line)
    except OSError as error:
        raise RunError(
            f"cannot write {path(run)}: {error.strerror}; the newest complete checkpoint is good: "
            f"make room and continue with `pflmpi resume {run}`"
        ) from error
