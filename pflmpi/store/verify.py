"""The text files of a run, held against its newest round file: what that vouches for, and what nothing vouches for.

Every command that shows a number asks here (`config.stored.verified` for config.yaml). A round file holds length and
CRC-32 of metrics.csv up to its round, the CRC-32 of partition.csv, and the configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pflmpi import regular_file
from pflmpi.errors import CheckpointError
from pflmpi.store import partition_file
from pflmpi.store.metrics import history, metrics_file
from pflmpi.store.metrics.history import History
from pflmpi.store.names import rounds
from pflmpi.store.partition_file import SampleCounts
from pflmpi.store.reading import read_attributes, read_history
from pflmpi.store.run_identity import foreign_by
from pflmpi.text import for_shell, spans


class Index(NamedTuple):
    """What the newest readable round file of a run says.

    Attributes:
        round: its number.
        attributes: of the file.
        history: of metrics.csv; None in files of format 1.
    """

    round: int
    attributes: Mapping[str, str | int | float]
    history: History | None


@dataclass(frozen=True)
class Metrics:
    """metrics.csv without a line that is being written.

    Attributes:
        names: its columns.
        texts: its lines after the header, those of rounds 1 to `len(texts)`.
        vouched: rounds up to this one are as a checkpoint recorded them.
        torn: whether half a line follows, which is left out.
    """

    names: tuple[str, ...]
    texts: tuple[str, ...]
    vouched: int
    torn: bool

    @cached_property
    def lines(self) -> list[dict[str, str]]:
        """One mapping from column to text for each round."""
        return [dict(zip(self.names, text.split(","), strict=True)) for text in self.texts]

    @property
    def notes(self) -> list[str]:
        """Which rounds no checkpoint vouches for, and what is left out; nothing where all is recorded."""
        later = spans(range(self.vouched + 1, len(self.texts) + 1))
        notes = [f"metrics of round {later} are not vouched for by a checkpoint"] if later else []
        return [*notes, f"metrics.csv ends in half a line after round {len(self.texts)}"] if self.torn else notes


def newest_index(run: Path) -> Index | None:
    """The newest round file of a run that can be read; None without any.

    Raises:
        CheckpointError: all that can be read belong to another run or round.
    """
    problems = []
    for number in reversed(rounds(run)):
        try:
            found = Index(number, read_attributes(run, number), read_history(run, number))
        except CheckpointError:
            continue  # which is said where checkpoints are read
        if problem := foreign_by(run, number, found.attributes):
            problems.append(problem)
        else:
            return found
    if problems:
        raise CheckpointError(problems[0])
    return None


def metrics(run: Path, last: int | None) -> Metrics:
    """The metrics of the rounds that have ended.

    Args:
        last: `training.rounds`; None if unknown.

    Raises:
        CheckpointError: the file is missing, not what the newest checkpoint recorded, or after that not what a run
            writes: rounds from 1 in order, up to the last, with a number in every column.
    """
    path, index = metrics_file.path(run), newest_index(run)
    try:
        content = regular_file.read(path)
        whole, end, rest = content.rpartition(b"\n")
        header, *texts = (whole + end).decode().split("\n")[:-1] or [""]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {_remedy(run, index)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {_remedy(run, index)}") from error
    vouched = 0
    if index is not None and index.history is not None:
        recorded, vouched = history.checksum(index.history), index.round
        head = content[: recorded.bytes]
        if history.checksum_of(head) != recorded or head.count(b"\n") != 1 + vouched:
            where = _differing(run, index.history, content)
            raise CheckpointError(f"{path} differs from what round {vouched} recorded{where}; {_remedy(run, index)}")
    found = Metrics(tuple(header.split(",")), tuple(texts), vouched, torn=bool(rest))
    if problem := _problem(found, last):
        raise CheckpointError(f"{path} is damaged: {problem}; {_remedy(run, index)}")
    return found


def metrics_copy(run: Path) -> None:
    """Raise `CheckpointError` unless the copy of metrics.csv has the lines that the newest round file has not."""
    index = newest_index(run)
    if index is not None and index.history is not None and not history.holds(history.path(run), index.history.before):
        raise CheckpointError(
            f"{history.path(run)} differs from what round {index.round} recorded; {_remedy(run, index)}"
        )


def partition(run: Path, recorded: Mapping[str, object]) -> SampleCounts | None:
    """Samples of each client and class; None for a run of the time before it had the file.

    Args:
        recorded: what the verified configuration has of the run.

    Raises:
        CheckpointError: the file is not the one that the run has written.
    """
    expected = recorded.get("partition_csv")
    if expected is not None and (problem := partition_file.damage(run, str(expected))):
        raise CheckpointError(problem)
    return partition_file.read(run)


def _differing(run: Path, recorded: History, content: bytes) -> str:
    """In which lines metrics.csv differs from what a checkpoint recorded, where its copy still says."""
    expected = (history.whole(run, recorded) or b"").splitlines()
    lines = content.splitlines()
    wrong = [i for i, line in enumerate(expected, 1) if lines[i - 1 : i] != [line]]
    return f" in line {spans(wrong)}" if wrong else ""


def _remedy(run: Path, index: Index | None) -> str:
    """What to do about damaged metrics: after the newest checkpoint the rounds are run again in any case."""
    if index is not None and index.history is not None and history.whole(run, index.history) is not None:
        return f"`pflmpi resume {for_shell(run)}` restores it"
    return "put it back from a copy"


def _problem(found: Metrics, last: int | None) -> str:
    """What is not as a run writes it in the header and in the lines that no checkpoint vouches for; "" if all is."""
    if found.vouched == 0 and found.names != tuple(name for name in metrics_file.COLUMNS if name in found.names):
        return "its first line does not name the columns of metrics"
    if missing := [name for name in metrics_file.FIRST_COLUMNS if name not in found.names]:
        return f"it has no column {missing[0]}"
    for number, text in enumerate(found.texts[found.vouched :], found.vouched + 1):
        values = text.split(",")
        if len(values) != len(found.names):
            return f"line {number + 1} has {len(values)} values, and there are {len(found.names)} columns"
        if values[0] != str(number):
            return f"line {number + 1} is of round {values[0]!r:.20}, and {number} is to follow"
        for name, value in zip(found.names, values, strict=True):
            if not metrics_file.is_number(name, value):
                return f"line {number + 1}, column {name}: {value!r:.40} is no number"
    if last is not None and len(found.texts) > last:
        return f"it has {len(found.texts)} rounds, and training.rounds is {last}"
    return ""
