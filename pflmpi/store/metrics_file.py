"""RUN/metrics.csv: one line per round; resuming drops the lines of rounds that will run again.

Each round file holds length and CRC-32 of metrics.csv as it was after the round; see `store.verify`.
"""

import contextlib
import csv
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from zlib_ng import zlib_ng as zlib

from pflmpi import atomic, regular_file
from pflmpi.errors import RunError
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.text import for_shell

EMPTY = Checksum(0, 0)
logger = logging.getLogger(__name__)

COLUMNS = (  # of every run, followed by those of its measures and its validation samples
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
    "skipped",  # participants that failed
    "unseen_accuracy_mean",  # of clients that do not take part in training
    "unseen_accuracy_weighted",
    "unseen_accuracy_std",
    "train_loss",  # mean over the participants
    "test_loss",
    "f1_macro",
    "accuracy_bottom",
    "trained_accuracy_mean",  # of the participants after local training (`evaluation.when: both`)
    "trained_accuracy_weighted",
    "trained_accuracy_std",
    "trained_test_loss",
    "waiting_seconds",  # for the slowest rank, mean over the ranks that compute
    "memory_rank_bytes",  # peak of the largest rank; 0: unknown
    "memory_bytes",  # peak of all ranks together
)
_NUMBER = re.compile(r"-?(\d+(\.\d*)?(e[-+]?\d+)?|inf|nan)", re.ASCII)
_OF_MEASURE = re.compile("(?!validation_)[a-z][a-z0-9_]*_(mean|weighted|bottom)", re.ASCII)
_COUNTS = ("round", "participants", "skipped")


def is_count(name: str) -> bool:
    """Whether the values of a column are whole numbers."""
    return name in _COUNTS or name.endswith("_bytes")


def select_measure_columns(names: Iterable[str]) -> list[str]:
    """Selects the columns of a run's own measures; leaves out any other name that a file may have."""
    return [name for name in names if name not in COLUMNS and _OF_MEASURE.fullmatch(name)]


def is_number(name: str, text: str) -> bool:
    """Whether a text is a valid value of a column; only counts may not be empty."""
    if is_count(name):
        return text.isdecimal() and len(text) < 19
    return not text or _NUMBER.fullmatch(text) is not None


def path(run: Path) -> Path:
    return run / "metrics.csv"


def read(run: Path) -> list[dict[str, str]]:
    """Reads the complete lines: for each round a mapping from column to text."""
    content = read_bytes(run).decode()
    lines = content[: content.rfind("\n") + 1].splitlines()  # a killed process may leave half a line
    return [row for row in csv.DictReader(lines) if None not in row and None not in row.values()]


def restart(run: Path, done: int, columns: Sequence[str] = COLUMNS) -> None:
    """Keep the lines of rounds 1 to `done` and drop the rest; writes blank lines where the file is missing."""
    lines = read_bytes(run).splitlines(keepends=True)[: done + 1] if done else []
    atomic.write(path(run), b"".join(lines) or _blank_lines(done, columns))


def _blank_lines(rounds: int, columns: Sequence[str]) -> bytes:
    """Returns the header and lines of so many rounds that have only their number: counts are 0, the rest is empty."""
    return change_columns("\n".join(["round", *map(str, range(1, rounds + 1))]).encode(), columns)


def begins_blank(content: bytes, rounds: int) -> bool:
    """Whether the file begins with the header of a run and with blank lines of so many rounds, as of `restart`."""
    columns = content.partition(b"\n")[0].decode(errors="replace").split(",")
    is_header = tuple(columns[: len(COLUMNS)]) == COLUMNS
    return rounds > 0 and is_header and content.startswith(_blank_lines(rounds, columns))


def change_columns(content: bytes, columns: Sequence[str]) -> bytes:
    """Returns the file with these columns instead; in new ones counts are 0, and other values empty."""
    blank = {name: "0" if is_count(name) else "" for name in columns}
    names, *lines = [line.split(",") for line in content.decode().splitlines()]
    rows = [{**blank, **dict(zip(names, line, strict=True))} for line in lines]
    table = [columns, *([row[name] for name in columns] for row in rows)]
    return "".join(f"{','.join(line)}\n" for line in table).encode()


def flush(run: Path) -> None:
    """Flush the lines so far to disk, before the round file that has their checksum."""
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, which `append` has logged
        descriptor = os.open(path(run), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checksum(content: bytes, before: Checksum = EMPTY) -> Checksum:
    """Computes length and CRC-32 of the file from its last bytes, `content`, and the checksum `before` them."""
    return Checksum(before.bytes + len(content), zlib.crc32(content, before.crc32))


def read_bytes(run: Path) -> bytes:
    """Reads the whole file; empty where there is none."""
    return regular_file.read(path(run)) if os.path.lexists(path(run)) else b""


def append(
    run: Path, line: Sequence[str | int], columns: Sequence[str] = COLUMNS, before: Checksum = EMPTY
) -> Checksum:
    """Append the line of a round, one value per column; returns the new checksum of the file.

    Where the file was deleted meanwhile, the rounds before get blank lines, as by `restart`.

    Args:
        before: checksum of the file so far.
    """
    assert len(line) == len(columns)
    written = f"{','.join(map(str, line))}\n".encode()
    try:
        with open(path(run), "ab", opener=regular_file.open_without_links) as file:
            if not file.tell():
                logger.warning("%s was deleted meanwhile; the figures of the rounds before are lost", path(run))
                before, written = EMPTY, _blank_lines(int(line[0]) - 1, columns) + written
            file.write(written)
    except OSError as error:
        raise RunError(
            f"cannot write {path(run)}: {error.strerror}; the newest complete checkpoint is intact: "
            f"{atomic.remedy(error)} and continue with `pflmpi resume {for_shell(run)}`"
        ) from error
    return checksum(written, before)
