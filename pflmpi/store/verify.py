"""Whether a run is as it was written: what every command asks before it shows or continues anything of it.

`checkpoint` is asked for the files of a round, `metrics` and `partition` for the text files (`config.stored.verified`
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
from pflmpi.store.checked_hdf5 import NewerFormatError
from pflmpi.store.hdf5 import File
from pflmpi.store.names import SHARDS, round_path, rounds
from pflmpi.store.partition_file import SampleCounts
from pflmpi.store.run_folder import read_attributes, read_checksums, read_layout, read_metrics_checksum
from pflmpi.store.shard import rows_problem
from pflmpi.text import for_shell, format_ranges

COMPLETE = "complete"  # `content` of a file that needs no other


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

    @cached_property
    def lost(self) -> int:
        """Rounds up to this one have no figures: the metrics.csv that had them was lost; see `metrics_file.restart`."""
        place = self.names.index("seconds")
        return sum(1 for _ in takewhile(lambda text: not text.split(",")[place], self.texts))

    @property
    def notes(self) -> list[str]:
        """Which rounds are lost, or no checkpoint vouches for, and what is left out; nothing where all is recorded."""
        lost, later = (
            format_ranges(range(1, self.lost + 1)),
            format_ranges(range(self.vouched + 1, len(self.texts) + 1)),
        )
        notes = [f"metrics of round {lost} are lost: totals, and costs to a target, are unknown"] if lost else []
        notes += [f"metrics of round {later} are not vouched for by a checkpoint"] if later else []
        return [*notes, f"metrics.csv ends in half a line after round {len(self.texts)}"] if self.torn else notes


def checkpoint(run: Path, round: int, *, whole: bool, intact: Collection[Path] = ()) -> dict[Path, str]:
    """What is wrong with the files of a round, by path: damage, or a file of another round or run in the place of one.

    Args:
        whole: every byte is read, and which clients the shards hold; otherwise only heads and lengths are.
        intact: shards whose bytes have been read, which are not read again.
    """
    path = round_path(run, round)
    check = checked_hdf5.damage if whole else checked_hdf5.truncated_problem
    if problem := check(path):
        return {path: problem}
    try:
        if problem := foreign(run, round, read_attributes(run, round)):
            return {path: problem}
        layout, recorded = read_layout(run, round), read_checksums(run, round)
    except CheckpointError as error:
        return {path: str(error)}
    problems: dict[Path, str] = {}
    for shard, expected in ((run / name, expected) for name, expected in sorted(recorded.items())):
        if shard not in intact and (problem := check(shard)):
            problems[shard] = problem
        elif checked_hdf5.recorded_checksum(shard) != expected:
            problems[shard] = f"{shard} is not the file that the checkpoint was made of; restore that one"
    for cohort in sorted(layout.cohorts) if whole else ():
        for shard, clients in ((run / name, clients) for name, clients in layout.shards(cohort)):
            if shard not in problems and (problem := rows_problem(shard, cohort, clients, layout.row[clients])):
                problems[shard] = problem
    return dict(sorted(problems.items()))


def problems(run: Path, round: int) -> list[str]:
    """Problems of a round, one line each; every byte of it is read."""
    return list(checkpoint(run, round, whole=True).values())


def newest_good(run: Path) -> tuple[int, list[str]]:
    """Newest round without problems, and the problems of the newer ones that were skipped.

    Raises:
        CheckpointError: the folder is not a run, or has no intact round.
    """
    if not run.is_dir():
        raise CheckpointError(elsewhere(run) or f"{run} is a checkpoint in one file, and no folder of a run")
    present = rounds(run)
    if not present:
        names = ", ".join(sorted(path.name for path in run.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"{run} has no checkpoint: it holds {names}, and no round_00000.h5 or later; name the folder that "
            "`pflmpi run` printed, or start again with `pflmpi run`"
        )
    skipped: list[str] = []
    for round in reversed(present):
        if round_path(run, round).is_dir():
            raise CheckpointError(f"{round_path(run, round)} is a directory named like a checkpoint; move it away")
        damages = problems(run, round)
        if not damages:
            return round, skipped
        skipped += damages
    if rounds(run)[-1:] > present[-1:]:  # it goes on, and has deleted meanwhile what was looked at
        return newest_good(run)
    newest = round_path(run, present[-1])
    if not (run / SHARDS).is_dir() and not checked_hdf5.damage(newest) and (lone := elsewhere(newest)):
        raise CheckpointError(lone)
    raise CheckpointError(
        f"{run} has no good checkpoint among {len(present)}: {'; '.join(dict.fromkeys(skipped))}; restore the files "
        "from a copy, or start again with `pflmpi run`"
    )


def elsewhere(path: Path) -> str | None:
    """What a path is and where the state is, if it is no folder of a run; None for a checkpoint in one file."""
    try:
        checked_hdf5.recorded_checksum(path)
    except CheckpointError:
        return f"{path} is no folder; name the folder that `pflmpi run` printed"
    if problem := checked_hdf5.damage(path):
        return problem
    with checked_hdf5.reading(path) as file:
        about = checked_hdf5.about(file)
        if about.get("content") == COMPLETE:
            return None
        if "layout" not in file:
            rank = f" of rank {about['rank']}" if "rank" in about else ""
            return f"{path} is a part of a run{rank}, and not a checkpoint; name the folder of the run"
        return _of_index(path, file)


def _of_index(path: Path, file: File) -> str:
    round = int(checked_hdf5.about(file)["run"]["round"])
    files = layouts.read_layout(file).files
    present = sum((path.parent / name).exists() for name in files)
    if present == len(files):
        return f"{path} is the index of a checkpoint; name the folder of the run, {path.parent}, with --round {round}"
    return (
        f"{path} is only the index of a checkpoint: it has what the server keeps, but the state of the clients lies in "
        f"{len(files)} files of the folder shards/, of which {present} are beside it; copy the folder of the run as a "
        f"whole, or write one file where the run is: `pflmpi export RUN --round {round} --all -o one.h5`"
    )


def foreign(run: Path, round: int, attributes: Mapping[str, str | int | float]) -> str | None:
    """Why a round file with these attributes belongs to another round or run, or None."""
    path, expected = round_path(run, round), config_file.run_id(run)
    if attributes["round"] != round:
        return f"{path} is the file of round {attributes['round']}; give it back its name"
    if expected is not None and "run" in attributes and attributes["run"] != expected:
        whose = f"{path} belongs to run {attributes['run']}, {run}/config.yaml to run {expected}"
        return f"{whose}; restore the files of one run"
    return None


def newest_index(run: Path) -> Mapping[str, str | int | float] | None:
    """The attributes of the newest round file of a run that can be read; None without any.

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
            continue  # which is said where checkpoints are read
        if problem := foreign(run, number, attributes):
            problems.append(problem)
        else:
            return attributes
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
        resumed = f"`pflmpi resume {for_shell(run)}` begins a new one, without figures of the rounds so far"
        raise CheckpointError(f"{path} is missing; {resumed}; or put it back from a copy") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {_remedy(run)}") from error
    vouched = 0
    if index is not None:
        vouched = int(index["round"])
        check_metrics(run, vouched)
    verified = Metrics(tuple(header.split(",")), tuple(texts), vouched, torn=bool(rest))
    if problem := _problem(verified, last):
        raise CheckpointError(f"{path} is damaged: {problem}; {_remedy(run)}")
    return verified


def check_metrics(run: Path, round: int) -> bytes:
    """The header of metrics.csv and its lines up to a round.

    Raises:
        CheckpointError: they are neither what the checkpoint recorded, nor without any figures, as where it was lost.
    """
    content = metrics_file.text(run)
    if _begins(content, run, round) or metrics_file.begins_blank(content, round):
        return b"".join(content.splitlines(keepends=True)[: 1 + round])
    intact = [other for other in rounds(run) if other < round and _begins(content, run, other)]
    first = max(intact, default=-1) + 2  # its header is line 1
    where = f"line {round + 1}" if first == round + 1 else f"lines {first} to {round + 1}"
    raise CheckpointError(
        f"{metrics_file.path(run)} differs from what round {round} recorded, in {where}; put it back from a copy, or "
        f"delete it: `pflmpi resume {for_shell(run)}` then begins a new one, without figures of the rounds so far"
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


def _begins(content: bytes, run: Path, round: int) -> bool:
    """Whether metrics.csv is up to a round as its checkpoint recorded it."""
    try:
        recorded = read_metrics_checksum(run, round)
    except CheckpointError:
        return False
    head = content[: recorded.bytes]
    return metrics_file.checksum(head) == recorded and head.count(b"\n") == 1 + round


def _remedy(run: Path) -> str:
    return f"put it back from a copy, or delete it and `pflmpi resume {for_shell(run)}`, which begins a new one"


def _problem(metrics: Metrics, last: int | None) -> str:
    """What is not as a run writes it in the header and in the lines that no checkpoint vouches for; "" if all is."""
    if metrics.vouched == 0 and metrics.names[: len(metrics_file.COLUMNS)] != metrics_file.COLUMNS:
        return "its first line does not name the columns of metrics"
    for number, text in enumerate(metrics.texts[metrics.vouched :], metrics.vouched + 1):
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
