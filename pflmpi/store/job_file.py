"""RUN/jobs.txt: the Slurm jobs of a run or a sweep, a line for each start and end: job id, restart count, host, JSON.

`submit` writes the first line, with `-` for the count, because the job has not started. The JSON is a `Submission`, a
`Start` or an `End`.
"""

import dataclasses
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from pflmpi import regular_file
from pflmpi.text import join_truncated, pluralize

_SLURM = "Slurm job "
RecordKind = TypeVar("RecordKind", "Submission", "Start", "End", "_Place")


@dataclass(frozen=True)
class Submission:
    """What `submit` records of a job.

    Attributes:
        log: absolute path of its output, or of its errors if they have a file, as given to sbatch: for an array with
            `%a` and `%j`.
        requeues: whether it is requeued before its time limit, and then continues.
        memory: bytes per node that `plan` predicted; 0 where it was not run.
        partition: of Slurm; "" for the default, None where it was not recorded.
        folder: inode of the folder; a copied folder has another. 0 where it was not recorded.
        rounds: of the whole run; 0 for several runs, and where it was not recorded.
        cells: of an array, the folder of each cell below that of the sweep, and the number of its task.
    """

    log: str
    requeues: bool = False
    memory: int = 0
    partition: str | None = None
    folder: int = 0
    rounds: int = 0
    cells: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """The start of a run by a job.

    Attributes:
        began: seconds since the epoch, when all ranks were connected.
        hosts: of the ranks.
        ranks: number of ranks.
        nodes, cores, gpus: allocated to the job; outside a job, those that the ranks may use.
        python: path of the interpreter.
        pflmpi, torch: versions.
        token: of the run's lock.
        folder: as in `Submission`.
    """

    began: float
    hosts: tuple[str, ...]
    ranks: int
    nodes: int
    cores: int
    gpus: int
    python: str
    pflmpi: str
    torch: str
    token: str = ""
    folder: int = 0

    def __str__(self) -> str:
        versions = f"pflmpi {self.pflmpi}, torch {self.torch}, {self.python}"
        return f"{versions}; {pluralize(self.ranks, 'rank')} on {join_truncated(self.hosts)}"


@dataclass(frozen=True)
class End:
    """The end of a run's process."""

    token: str  # as in its `Start`
    ended: float  # seconds since the epoch; for a process that was killed, when its lock was last touched
    cpu_seconds: float | None = None  # CPU time of all ranks; None for a process that was killed


@dataclass(frozen=True)
class _Place:
    """The folder that a `Submission` or a `Start` names; an `End` names none."""

    folder: int


@dataclass(frozen=True)
class Usage:
    """How many times jobs have started a run, and as text their hours, restarts and hosts."""

    starts: int
    text: str

    def __str__(self) -> str:
        return self.text


def hours(node_seconds: float, gpu_seconds: float, core_seconds: float, busy: float | None) -> str:
    """Formats what was allocated; `busy` is the share of the cores' time that was used, None if unknown.

    >>> hours(3600, 0, 14400, 0.5), hours(900, 1800, 0, None)
    ('1.00 node hours, 4.00 core hours (50% busy)', '0.25 node hours, 0.50 GPU hours')
    """
    share = "" if busy is None else f" ({busy:.0%} busy)"
    parts = [f"{node_seconds / 3600:.2f} node hours"]
    if core_seconds:
        parts.append(f"{core_seconds / 3600:.2f} core hours{share}")
    if gpu_seconds:
        parts.append(f"{gpu_seconds / 3600:.2f} GPU hours")
    return ", ".join(parts)


def path(folder: Path) -> Path:
    return folder / "jobs.txt"


def append(folder: Path, job: str, restarts: str = "-", record: Submission | Start | End | None = None) -> None:
    """Add a line; the folder exists."""
    text = f" {json.dumps(dataclasses.asdict(record))}" if record else ""
    with open(path(folder), "a", encoding="utf-8", opener=regular_file.open_without_links) as file:
        file.write(f"{job} {restarts} {socket.gethostname()}{text}\n")


def record(run: Path, jobs: Mapping[str, int], record: Start | End | None) -> None:
    """Add a line for the Slurm job that this process runs in, if any; for `jobs` see `store.run_lock.Owner`."""
    for name, restarts in jobs.items():
        if name.startswith(_SLURM):
            append(run, name.removeprefix(_SLURM), str(restarts), record)


def read_restarts(folder: Path) -> dict[str, int]:
    """Reads the recorded restarts of each job, by id, without those of a folder that was copied; the newest is last."""
    places = dict(_records(folder, _Place))
    return {
        job: restarts
        for job, restarts in _read_all_restarts(folder).items()
        if job not in places or _was_made_in(places[job], folder)
    }


def _was_made_in(record: _Place | Submission, folder: Path) -> bool:
    """Whether a record was made in this folder, not in one that it was copied from."""
    return record.folder in (0, folder.stat().st_ino)


def _read_all_restarts(folder: Path) -> dict[str, int]:
    jobs: dict[str, int] = {}
    for job, restarts, *_ in _lines(folder):
        jobs[job] = max(int(restarts) if restarts.isdecimal() else 0, jobs.pop(job, 0))
    return jobs


def read_submissions(folder: Path) -> dict[str, Submission]:
    """Reads what `submit` recorded, by job id, without that of a folder that was copied; the newest job is last."""
    return {job: submission for job, submission in _records(folder, Submission) if _was_made_in(submission, folder)}


def compute_usage(folder: Path) -> Usage | None:
    """Computes what the jobs of a run have used; None where no job has started it."""
    starts = [start for _, start in _records(folder, Start)]
    if not starts:
        return None
    hosts = tuple(dict.fromkeys(host for start in starts for host in start.hosts))
    ends = {end.token: end for _, end in _records(folder, End)}
    node_seconds = gpu_seconds = core_seconds = measured_core_seconds = cpu_seconds = 0.0
    open_starts = 0
    for start in starts:
        if (end := ends.get(start.token)) is None or end.ended < start.began:  # a clock was set back
            open_starts += 1
            continue
        seconds = end.ended - start.began
        node_seconds += start.nodes * seconds
        gpu_seconds += start.gpus * seconds
        core_seconds += start.cores * seconds
        if end.cpu_seconds is not None:
            measured_core_seconds += start.cores * seconds
            cpu_seconds += end.cpu_seconds
    busy = cpu_seconds / measured_core_seconds if measured_core_seconds else None
    text = hours(node_seconds, gpu_seconds, core_seconds, busy)
    if open_starts:
        text += f", without {pluralize(open_starts, 'start')} whose end is unknown"
    jobs = [f"{job} ({pluralize(number, 'restart')})" for job, number in _read_all_restarts(folder).items()]
    return Usage(len(starts), f"{text}; job {join_truncated(jobs)} on {join_truncated(hosts)}")


def _records(folder: Path, kind: type[RecordKind]) -> Iterator[tuple[str, RecordKind]]:
    """Yields the records of a kind, each with the id of its job."""
    reader = TypeAdapter(kind)
    for job, _, _, *text in _lines(folder):
        try:
            yield job, reader.validate_json(text[0])
        except (IndexError, ValidationError):
            continue  # no record, or one of another kind


def _lines(folder: Path) -> Iterator[list[str]]:
    """Yields job id, restart count, host, and the JSON, if any, of each complete line."""
    try:
        text = regular_file.read(path(folder)).decode(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        words = line.split(maxsplit=3)
        if len(words) >= 3 and words[0].isdecimal():
            yield words
