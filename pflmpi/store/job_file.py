"""RUN/jobs.txt: the Slurm jobs of a run or a sweep, a line for each start and end: job id, restart count, host, JSON.

`submit` writes the first line, with `-` for the count, since a job that waits has not started. The JSON is a
`Submission`, a `Start` or an `End`.
"""

import dataclasses
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from pflmpi import regular_file
from pflmpi.text import join_truncated, pluralize

_SLURM = "Slurm job "
RecordKind = TypeVar("RecordKind", "Submission", "Start", "End")


@dataclass(frozen=True)
class Submission:
    """What `submit` knows of a job.

    Attributes:
        log: file with its output, or its errors if they have one, absolute, as sbatch takes it: of an array with `%a`
            and `%j` for its tasks.
        requeues: whether it is requeued before its time limit, and continues by itself.
        memory: bytes of a node that `plan` counted; 0 where nobody asked.
        partition: that it was submitted to; "" for the default, None where it was not noted.
    """

    log: str
    requeues: bool = False
    memory: int = 0
    partition: str | None = None


@dataclass(frozen=True)
class Start:
    """What started a run, and where.

    Attributes:
        began: seconds since the epoch, when the ranks had met.
        hosts: of the ranks.
        ranks: their number.
        nodes, cores, gpus: of the job, or else those that the ranks may use.
        python: path of the interpreter.
        pflmpi, torch: versions.
        token: of the run's lock; "" for a run that no job has started.
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

    def __str__(self) -> str:
        versions = f"pflmpi {self.pflmpi}, torch {self.torch}, {self.python}"
        return f"{versions}; {pluralize(self.ranks, 'rank')} on {join_truncated(self.hosts)}"


@dataclass(frozen=True)
class End:
    """The end of a start.

    Attributes:
        ended: seconds since the epoch; of a process that was killed when its lock was last touched.
        cpu_seconds: that the ranks have computed, together; None of one that was killed.
    """

    token: str
    ended: float
    cpu_seconds: float | None = None


@dataclass(frozen=True)
class Usage:
    """The starts of a run by jobs, and what was allocated from each to its end: hours, restarts, hosts."""

    starts: int
    text: str

    def __str__(self) -> str:
        return self.text


def hours(node_seconds: float, gpu_seconds: float, core_seconds: float, busy: float | None) -> str:
    """What was allocated, and which share of the cores' time was used, None if that is unknown.

    >>> hours(3600, 0, 14400, 0.5), hours(900, 1800, 0, None)
    ('1.00 node hours, 4.00 core hours (50% busy)', '0.25 node hours, 0.50 GPU hours')
    """
    share = "" if busy is None else f" ({busy:.0%} busy)"
    words = [f"{node_seconds / 3600:.2f} node hours"]
    words += [f"{core_seconds / 3600:.2f} core hours{share}"] if core_seconds else []
    words += [f"{gpu_seconds / 3600:.2f} GPU hours"] if gpu_seconds else []
    return ", ".join(words)


def path(folder: Path) -> Path:
    return folder / "jobs.txt"


def append(folder: Path, job: str, restarts: str = "-", record: Submission | Start | End | None = None) -> None:
    """Add a line; the folder exists."""
    more = f" {json.dumps(dataclasses.asdict(record))}" if record else ""
    with open(path(folder), "a", encoding="utf-8", opener=regular_file.not_through_a_link) as file:
        file.write(f"{job} {restarts} {socket.gethostname()}{more}\n")


def record(run: Path, jobs: Mapping[str, int], record: Start | End | None) -> None:
    """Add a line for the Slurm job that starts the run, if one does; for `jobs` see `store.run_lock.Owner`."""
    for name, restarts in jobs.items():
        if name.startswith(_SLURM):
            append(run, name.removeprefix(_SLURM), str(restarts), record)


def read(folder: Path) -> dict[str, int]:
    """How often each job was restarted, as far as it was recorded, by its id; the newest job is last."""
    jobs: dict[str, int] = {}
    for job, restarts, *_ in _lines(folder):
        jobs[job] = max(int(restarts) if restarts.isdecimal() else 0, jobs.pop(job, 0))
    return jobs


def submissions(folder: Path) -> dict[str, Submission]:
    """What `submit` knew of the jobs that it has submitted, by their ids; the newest is last."""
    return dict(_records(folder, Submission))


def usage(folder: Path) -> Usage | None:
    """What the jobs of a run have used; None where no job has started it."""
    starts = [start for _, start in _records(folder, Start)]
    if not starts:
        return None
    hosts = tuple(dict.fromkeys(host for start in starts for host in start.hosts))
    ends = {end.token: end for _, end in _records(folder, End)}
    ended = [(start, ends[start.token]) for start in starts if start.token in ends]
    measured = [(start, end) for start, end in ended if end.cpu_seconds is not None]

    def allocated(kind: str, among: list[tuple[Start, End]]) -> float:
        return float(sum(getattr(start, kind) * (end.ended - start.began) for start, end in among))

    cores = allocated("cores", measured)
    busy = sum(end.cpu_seconds or 0.0 for _, end in measured) / cores if cores else None
    used = hours(allocated("nodes", ended), allocated("gpus", ended), allocated("cores", ended), busy)
    endless = len(starts) - len(ended)
    without = f", without {pluralize(endless, 'start')} whose end is unknown" if endless else ""
    jobs = [f"{job} ({pluralize(number, 'restart')})" for job, number in read(folder).items()]
    return Usage(len(starts), f"{used}{without}; job {join_truncated(jobs)} on {join_truncated(hosts)}")


def _records(folder: Path, kind: type[RecordKind]) -> Iterator[tuple[str, RecordKind]]:
    """The records of a kind, each with the id of its job."""
    reader = TypeAdapter(kind)
    for job, _, _, *more in _lines(folder):
        try:
            yield job, reader.validate_json(more[0])
        except (IndexError, ValidationError):
            continue  # of another kind, or not ours


def _lines(folder: Path) -> Iterator[list[str]]:
    """The whole lines: job id, restart count, host, and what follows."""
    try:
        text = regular_file.read(path(folder)).decode(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        words = line.split(maxsplit=3)
        if len(words) >= 3 and words[0].isdecimal():
            yield words
