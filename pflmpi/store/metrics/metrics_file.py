"""RUN/metrics.csv: one line per round; resuming drops the lines of rounds that will run again."""

import csv
import io
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pflmpi import atomic, regular_file
from pflmpi.errors import CheckpointError, RunError
from pflmpi.text import for_shell

logger = logging.getLogger(__name__)

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
    "skipped",  # participants that failed; files of 0.1 have no such column
    "unseen_accuracy_mean",  # of clients that were kept out of training; older files have none
    "unseen_accuracy_weighted",
    "unseen_accuracy_std",
    "train_loss",  # mean over the participants; older files have none of these
    "test_loss",
    "f1_macro",
    "accuracy_bottom",
    "trained_accuracy_mean",  # of the participants after local training (`evaluation.when: both`)
    "trained_accuracy_weighted",
    "trained_accuracy_std",
    "trained_test_loss",
    "waiting_seconds",  # for the slowest rank, the mean of the ranks that compute; older files have none of these
    "memory_rank_bytes",  # the most that the largest rank ever had; 0: unknown
    "memory_bytes",  # that of all ranks together
)
FIRST_COLUMNS = COLUMNS[: COLUMNS.index("checkpoint_seconds")]  # which files of every version have
# What an older file's lines get in a column that it has not.
_MISSING = {"skipped": "0", "memory_rank_bytes": "0", "memory_bytes": "0"}
_NUMBER = re.compile(r"-?(\d+(\.\d*)?(e[-+]?\d+)?|inf|nan)", re.ASCII)
_COUNTS = ("round", "participants", "skipped")


def is_count(name: str) -> bool:
    """Whether the values of a column are whole numbers."""
    return name in _COUNTS or name.endswith("_bytes")


def is_number(name: str, text: str) -> bool:
    """Whether a text is a value of a column; measures may be empty where a round has none."""
    return text.isdecimal() and len(text) < 19 if is_count(name) else not text or _NUMBER.fullmatch(text) is not None


def path(run: Path) -> Path:
    """The metrics file of a run."""
    return run / "metrics.csv"


def read(run: Path) -> list[dict[str, str]]:
    """Complete lines of the file with as many values as columns, one mapping from column to text per round."""
    if not os.path.lexists(path(run)):
        return []
    text = regular_file.read(path(run)).decode()
    lines = text[: text.rfind("\n") + 1].splitlines()  # a killed process may leave half a line
    return [row for row in csv.DictReader(lines) if None not in row and None not in row.values()]


def restart(run: Path, done: int) -> None:
    """Keep the lines of rounds 1 to `done` and drop the rest; creates the file if it is missing."""
    kept = _kept(run, done) if done else []
    with atomic.replacing(path(run)) as descriptor, open(descriptor, "w", newline="", closefd=False) as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**_MISSING, **line} for line in kept)


def _kept(run: Path, done: int) -> list[dict[str, str]]:
    try:
        lines = read(run)
        other = set(lines[0]) - set(COLUMNS) if lines else set()
        if other:
            raise ValueError(f"it has columns that this pflmpi does not write, such as {min(other)}")
        return [line for line in lines if int(line["round"]) <= done]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise CheckpointError(f"{path(run)} is damaged: {error}; put it back from a copy, or delete it") from error


def restore(run: Path, text: bytes) -> None:
    """Put back the file as a checkpoint recorded it."""
    atomic.write(path(run), text)


def text(run: Path) -> bytes:
    """The whole file; nothing where there is none."""
    return regular_file.read(path(run)) if os.path.lexists(path(run)) else b""


def append(run: Path, line: Sequence[str | int]) -> str:
    """Append the line of a round, one value per column; return it."""
    assert len(line) == len(COLUMNS)
    csv.writer(written := io.StringIO(), lineterminator="\n").writerow(line)
    try:
        with open(path(run), "a", newline="", opener=_not_through_a_link) as file:
            if not file.tell():
                logger.warning("%s was deleted meanwhile; `pflmpi resume` puts it back from the checkpoint", path(run))
                csv.writer(file, lineterminator="\n").writerow(COLUMNS)
            file.write(written.getvalue())
    except OSError as error:
        raise RunError(
            f"cannot write {path(run)}: {error.strerror}; the newest complete checkpoint is intact: "
            f"{atomic.remedy(error)} and continue with `pflmpi resume {for_shell(run)}`"
        ) from error
    return written.getvalue()


def _not_through_a_link(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)
