"""RUN/metrics.csv: one line per round; resuming drops the lines of rounds that will run again.

Each round file holds the length and CRC-32 of the file as it was after the round; see `store.verify`.
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

COLUMNS = (  # of every run; those of its measures, and of its validation samples, follow
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
    "unseen_accuracy_mean",  # of clients that were kept out of training
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
    "waiting_seconds",  # for the slowest rank, the mean of the ranks that compute
    "memory_rank_bytes",  # the most that the largest rank ever had; 0: unknown
    "memory_bytes",  # that of all ranks together
)
_NUMBER = re.compile(r"-?(\d+(\.\d*)?(e[-+]?\d+)?|inf|nan)", re.ASCII)
_OF_MEASURE = re.compile("(?!validation_)[a-z][a-z0-9_]*_(mean|weighted|bottom)", re.ASCII)
_COUNTS = ("round", "participants", "skipped")


def is_count(name: str) -> bool:
    """Whether the values of a column are whole numbers."""
    return name in _COUNTS or name.endswith("_bytes")


def of_measures(names: Iterable[str]) -> list[str]:
    """The columns that only the measures of a run give it; other names that a file may have are left out."""
    return [name for name in names if name not in COLUMNS and _OF_MEASURE.fullmatch(name)]


def is_number(name: str, text: str) -> bool:
    """Whether a text is a value of a column; measures may be empty where a round has none."""
    return text.isdecimal() and len(text) < 19 if is_count(name) else not text or _NUMBER.fullmatch(text) is not None


def path(run: Path) -> Path:
    return run / "metrics.csv"


def read(run: Path) -> list[dict[str, str]]:
    """Complete lines of the file with as many values as columns, one mapping from column to text per round."""
    content = text(run).decode()
    lines = content[: content.rfind("\n") + 1].splitlines()  # a killed process may leave half a line
    return [row for row in csv.DictReader(lines) if None not in row and None not in row.values()]


def restart(run: Path, done: int, columns: Sequence[str] = COLUMNS) -> None:
    """Keep the lines of rounds 1 to `done` and drop the rest; where the file is missing, those have no figures."""
    lines = text(run).splitlines(keepends=True)[: done + 1] if done else []
    atomic.write(path(run), b"".join(lines) or _without_figures(done, columns))


def _without_figures(rounds: int, columns: Sequence[str]) -> bytes:
    return with_columns("\n".join(["round", *map(str, range(1, rounds + 1))]).encode(), columns)


def is_lost(content: bytes, rounds: int) -> bool:
    """Whether the file begins with rounds without figures, as `restart` writes them, and with the columns of a run."""
    columns = content.partition(b"\n")[0].decode(errors="replace").split(",")
    of_run = tuple(columns[: len(COLUMNS)]) == COLUMNS
    return rounds > 0 and of_run and content.startswith(_without_figures(rounds, columns))


def with_columns(content: bytes, columns: Sequence[str]) -> bytes:
    """The lines with these columns; those that were not there have no figures."""
    nothing = {name: "0" if is_count(name) else "" for name in columns}
    names, *lines = [line.split(",") for line in content.decode().splitlines()]
    rows = [{**nothing, **dict(zip(names, line, strict=True))} for line in lines]
    return "".join(
        f"{','.join(row)}\n" for row in [columns, *([row[name] for name in columns] for row in rows)]
    ).encode()


def flush(run: Path) -> None:
    """Bring the lines so far to disk, before the round file that vouches for them."""
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, as `append` has said
        descriptor = os.open(path(run), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checksum(content: bytes, before: Checksum = EMPTY) -> Checksum:
    """Length and CRC-32 of the file, of which `content` are the last bytes and `before` describes the others."""
    return Checksum(before.bytes + len(content), zlib.crc32(content, before.crc32))


def text(run: Path) -> bytes:
    """The whole file; nothing where there is none."""
    return regular_file.read(path(run)) if os.path.lexists(path(run)) else b""


def append(
    run: Path, line: Sequence[str | int], columns: Sequence[str] = COLUMNS, before: Checksum = EMPTY
) -> Checksum:
    """Append the line of a round, one value per column; return the checksum of the file, which was `before`.

    Where the file was deleted meanwhile, the rounds before have no figures, as after `restart`.
    """
    assert len(line) == len(columns)
    written = f"{','.join(map(str, line))}\n".encode()
    try:
        with open(path(run), "ab", opener=regular_file.not_through_a_link) as file:
            if not file.tell():
                logger.warning("%s was deleted meanwhile; the figures of the rounds before are lost", path(run))
                before, written = EMPTY, _without_figures(int(line[0]) - 1, columns) + written
            file.write(written)
    except OSError as error:
        raise RunError(
            f"cannot write {path(run)}: {error.strerror}; the newest complete checkpoint is intact: "
            f"{atomic.remedy(error)} and continue with `pflmpi resume {for_shell(run)}`"
        ) from error
    return checksum(written, before)
