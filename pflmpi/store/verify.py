"""Verifies that a run is as it was written; every command does so before it shows or continues a run.

`checkpoint` verifies the files of a round, `metrics` and `partition` the text files (`config.stored.verified` does so
for config.yaml). A round file holds the checksums of its shards, length and CRC-32 of metrics.csv up to its round, the
CRC-32 of partition.csv, and the configuration.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from pflmpi import regular_file
from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5, config_file, metrics_file, partition_file
from pflmpi.store import layout as layouts
from pflmpi.store.checked_hdf5 import NewerFormatError, UnreadableError
from pflmpi.store.hdf5 import File
from pflmpi.store.names import SHARDS, round_path, rounds
from pflmpi.store.partition_file import SampleCounts
from pflmpi.store.run_folder import read_attributes, read_checksums, read_layout, read_metrics_checksum
from pflmpi.store.shard import find_row_problem
from pflmpi.text import for_shell, format_ranges, pluralize

COMPLETE = "complete"  # `content` of a file that needs no other


@dataclass(frozen=True)
class Metrics:
    """The complete lines of metrics.csv."""

    names: tuple[str, ...]  # its columns
    texts: tuple[str, ...]  # its lines after the header, those of rounds 1 to `len(texts)`
    verified: int  # the last round up to which a checkpoint recorded the file
    torn: bool  # whether an incomplete line follows

    @cached_property
    def lines(self) -> list[dict[str, str]]:
        """A mapping from column to text for each round."""
        return [dict(zip(self.names, text.split(","), strict=True)) for text in self.texts]

    @cached_property
    def lost(self) -> int:
        """The last round of the blank lines that the file begins with where it was lost; see `metrics_file.restart`."""
        column = self.names.index("seconds")
        return sum(1 for _ in takewhile(lambda text: not text.split(",")[column], self.texts))

    @property
    def notes(self) -> list[str]:
        """What a reader of the metrics should know: which rounds are lost or unverified, and an incomplete line."""
        notes = []
        if self.lost:
            lost = format_ranges(range(1, self.lost + 1))
            notes.append(f"metrics of round {lost} are lost: totals, and costs to a target, are unknown")
        if self.verified < len(self.texts):
            later = format_ranges(range(self.verified + 1, len(self.texts) + 1))
            notes.append(f"metrics of round {later} are not vouched for by a checkpoint")
        if self.torn:
            notes.append(f"metrics.csv ends in half a line after round {len(self.texts)}")
        return notes


def checkpoint(run: Path, round: int, *, whole: bool, intact: Collection[Path] = ()) -> dict[Path, str]:
    """Returns the problems of the files of a round, by path: damage, or a file that belongs to another round or run.

    Args:
        whole: read every byte, and which clients the shards hold; otherwise only heads and lengths.
        intact: shards that need not be read again.

    Raises:
        UnreadableError: with `whole`, a file cannot be read, whatever its bytes.
    """
    path = round_path(run, round)
    find_problem = checked_hdf5.find_damage if whole else checked_hdf5.find_truncation
    if problem := find_problem(path):
        return {path: problem}
    try:
        if problem := _owner_problem(run, round, read_attributes(run, round)):
            return {path: problem}
        layout, recorded = read_layout(run, round), read_checksums(run, round)
    except CheckpointError as error:
        return {path: str(error)}
    problems: dict[Path, str] = {}
    for shard, expected in ((run / name, expected) for name, expected in sorted(recorded.items())):
        if shard not in intact and (problem := find_problem(shard)):
            problems[shard] = problem
        elif checked_hdf5.recorded_checksum(shard) != expected:
            problems[shard] = f"{shard} is not the file that the checkpoint was made of; restore that one"
    if whole:
        for cohort in sorted(layout.cohorts):
            for name, clients in layout.shards(cohort):
                shard = run / name
                if shard not in problems and (problem := find_row_problem(shard, cohort, clients, layout.row[clients])):
                    problems[shard] = problem
    return dict(sorted(problems.items()))


def problems(run: Path, round: int) -> list[str]:
    """Returns the problems of a round, one line each; reads every byte of it, and raises as `checkpoint`."""
    return list(checkpoint(run, round, whole=True).values())


def list_rounds(run: Path) -> list[int]:
    """Lists the rounds that have a checkpoint, ascending; raises `CheckpointError` if none has."""
    if not run.is_dir():
        raise CheckpointError(explain_not_a_run(run) or f"{run} is a checkpoint in one file, and no folder of a run")
    if present := rounds(run):
        return present
    names = ", ".join(sorted(path.name for path in run.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{run} has no checkpoint: it holds {names}, and no round_00000.h5 or later; name the folder that "
        "`pflmpi run` printed, or start again with `pflmpi run`"
    )


def find_newest_good(run: Path, skips_unreadable: bool = False) -> tuple[int, list[str]]:
    """Finds the newest round without problems; returns it and the problems of the newer rounds.

    Args:
        skips_unreadable: whether a file that cannot be read is a problem like others, for those that only read.

    Raises:
        CheckpointError: the folder is not a run, or has no intact round.
        UnreadableError: a file of a newer round cannot be read, and may be good.
    """
    present = list_rounds(run)
    skipped: list[str] = []
    for round in reversed(present):
        if round_path(run, round).is_dir():
            raise CheckpointError(f"{round_path(run, round)} is a directory named like a checkpoint; move it away")
        try:
            round_problems = problems(run, round)
        except UnreadableError as error:
            if skips_unreadable:
                skipped.append(str(error))
                continue
            cure = "make it readable, or move it away, so that an older checkpoint is taken"
            raise UnreadableError(f"{error}; {cure}") from error
        if not round_problems:
            return round, skipped
        skipped += round_problems
    if rounds(run)[-1:] > present[-1:]:  # the run is going on, and has meanwhile pruned the rounds read here
        return find_newest_good(run, skips_unreadable)
    newest = round_path(run, present[-1])
    if not (run / SHARDS).is_dir() and not checked_hdf5.find_damage(newest) and (lone := explain_not_a_run(newest)):
        raise CheckpointError(lone)
    raise CheckpointError(
        f"{run} has no good checkpoint among {len(present)}: {'; '.join(dict.fromkeys(skipped))}; restore the files "
        "from a copy, or start again with `pflmpi run`"
    )


def explain_lost_checkpoints(run: Path) -> str:
    """Why a run without a checkpoint must not be replaced; "" if it has no metrics of a round."""
    lines = metrics_file.read_bytes(run).count(b"\n") - 1
    if lines < 1:
        return ""
    return (
        f"{run} has metrics of {pluralize(lines, 'round')} and no checkpoint; put its checkpoints back from a copy to "
        "go on, or move it away to start anew"
    )


def explain_not_a_run(path: Path) -> str | None:
    """Returns what a path is that is no folder of a run, and where its state is; None for a checkpoint in one file."""
    try:
        checked_hdf5.recorded_checksum(path)
    except CheckpointError:
        return f"{path} is no folder; name the folder that `pflmpi run` printed"
    if problem := checked_hdf5.find_damage(path):
        return problem
    with checked_hdf5.reading(path) as file:
        about = checked_hdf5.read_about(file)
        if about.get("content") == COMPLETE:
            return None
        if "layout" not in file:
            rank = f" of rank {about['rank']}" if "rank" in about else ""
            return f"{path} is a part of a run{rank}, and not a checkpoint; name the folder of the run"
        return _describe_index(path, file)


def _describe_index(path: Path, file: File) -> str:
    round = int(checked_hdf5.read_about(file)["run"]["round"])
    files = layouts.read_layout(file).files
    present = sum((path.parent / name).exists() for name in files)
    if present == len(files):
        return f"{path} is the index of a checkpoint; name the folder of the run, {path.parent}, with --round {round}"
    return (
        f"{path} is only the index of a checkpoint: it has what the server keeps, but the state of the clients lies in "
        f"{len(files)} files of the folder shards/, of which {present} are beside it; copy the folder of the run as a "
        f"whole, or write one file where the run is: `pflmpi export RUN --round {round} --all -o one.h5`"
    )


def _owner_problem(run: Path, round: int, attributes: Mapping[str, str | int | float]) -> str | None:
    """Returns why a round file with these attributes belongs to another round or run, or None."""
    path, expected = round_path(run, round), config_file.run_id(run)
    if attributes["round"] != round:
        return f"{path} is the file of round {attributes['round']}; give it back its name"
    if expected is not None and "run" in attributes and attributes["run"] != expected:
        whose = f"{path} belongs to run {attributes['run']}, {run}/config.yaml to run {expected}"
        return f"{whose}; restore the files of one run"
    return None


def verify_newest_attributes(run: Path) -> Mapping[str, str | int | float] | None:
    """Reads the attributes of the newest readable round file of a run; None without any.

    Raises:
        CheckpointError: all that can be read belong to another run or round, or a newer pflmpi has written them.
    """
    problems = []
    for number in reversed(rounds(run)):
        try:
            attributes = read_attributes(run, number)
        except NewerFormatError:
            raise
        except CheckpointError:
            continue  # reported where checkpoints are read
        if problem := _owner_problem(run, number, attributes):
            problems.append(problem)
        else:
            return attributes
    if problems:
        raise CheckpointError(problems[0])
    return None


def metrics(run: Path, last: int | None) -> Metrics:
    """Reads the metrics of the rounds so far.

    Args:
        last: `training.rounds`; None if unknown.

    Raises:
        CheckpointError: the file is missing, not what the newest checkpoint recorded, or after that not what a run
            writes: rounds from 1 in order, up to the last, with a number in every column.
    """
    path, index = metrics_file.path(run), verify_newest_attributes(run)
    try:
        content = regular_file.read(path)
        whole, end, rest = content.rpartition(b"\n")
        header, *texts = (whole + end).decode().split("\n")[:-1] or [""]
    except FileNotFoundError as error:
        resumed = f"`pflmpi resume {for_shell(run)}` begins a new one, without figures of the rounds so far"
        raise CheckpointError(f"{path} is missing; {resumed}; or put it back from a copy") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {_remedy(run)}") from error
    verified = 0
    if index is not None:
        verified = int(index["round"])
        check_metrics(run, verified)
    metrics = Metrics(tuple(header.split(",")), tuple(texts), verified, torn=bool(rest))
    if problem := _metrics_problem(metrics, last):
        raise CheckpointError(f"{path} is damaged: {problem}; {_remedy(run)}")
    return metrics


def check_metrics(run: Path, round: int) -> bytes:
    """Verifies metrics.csv up to a round; returns its header and these lines.

    Raises:
        CheckpointError: they are neither what the checkpoint recorded, nor blank as where the file was lost.
    """
    content = metrics_file.read_bytes(run)
    if _is_recorded(content, run, round) or metrics_file.begins_blank(content, round):
        return b"".join(content.splitlines(keepends=True)[: 1 + round])
    intact = [other for other in rounds(run) if other < round and _is_recorded(content, run, other)]
    first = max(intact, default=-1) + 2  # its header is line 1
    where = f"line {round + 1}" if first == round + 1 else f"lines {first} to {round + 1}"
    raise CheckpointError(
        f"{metrics_file.path(run)} differs from what round {round} recorded, in {where}; put it back from a copy, or "
        f"delete it: `pflmpi resume {for_shell(run)}` then begins a new one, without figures of the rounds so far"
    )


def partition(run: Path, recorded: Mapping[str, object]) -> SampleCounts | None:
    """Reads the samples of each client and class; None for an old run without the file.

    Args:
        recorded: the section of that name in the verified configuration.

    Raises:
        CheckpointError: the file is not the one that the run has written.
    """
    expected = recorded.get("partition_csv")
    if expected is not None and (problem := partition_file.find_damage(run, str(expected))):
        raise CheckpointError(problem)
    return partition_file.read(run)


def _is_recorded(content: bytes, run: Path, round: int) -> bool:
    """Whether metrics.csv up to a round is as its checkpoint recorded it."""
    try:
        recorded = read_metrics_checksum(run, round)
    except CheckpointError:
        return False
    head = content[: recorded.bytes]
    return metrics_file.checksum(head) == recorded and head.count(b"\n") == 1 + round


def _remedy(run: Path) -> str:
    return f"put it back from a copy, or delete it and `pflmpi resume {for_shell(run)}`, which begins a new one"


def _metrics_problem(metrics: Metrics, last: int | None) -> str:
    """Returns the problem of the header and of the lines that no checkpoint recorded; "" without any."""
    if metrics.verified == 0 and metrics.names[: len(metrics_file.COLUMNS)] != metrics_file.COLUMNS:
        return "its first line does not name the columns of metrics"
    for number, text in enumerate(metrics.texts[metrics.verified :], metrics.verified + 1):
        values = text.split(",")
        if len(values) != len(metrics.names):
            return f"line {number + 1} has {len(values)} values, and there are {len(metrics.names)} columns"
        if values[0] != str(number):
            return f"line {number + 1} is of round {values[0]!r:.20}, and {number} is to follow"
        for name, value in zip(metrics.names, values, strict=True):
            if not metrics_file.is_number(name, value):
                return f"line {number + 1}, column {name}: {value!r:.40} is no number"
    if last is not None and len(metrics.texts) > last:
        return f"it has {len(metrics.texts)} rounds, and training.rounds is {last}"
    return ""
