"""RUN/jobs.txt: the Slurm jobs of a run or a sweep, a line for each start: job id, restart count, host.

`submit` writes the first line, with `-` for the count, since a job that waits has not started, and what it knows of the
job as JSON behind the host.
"""

import dataclasses
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pflmpi import regular_file

_SLURM = "Slurm job "


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


def path(folder: Path) -> Path:
    """File of a run's folder, or of a sweep's."""
    return folder / "jobs.txt"


def append(folder: Path, job: str, restarts: str = "-", submission: Submission | None = None) -> None:
    """Add a line; the folder exists."""
    more = f" {json.dumps(dataclasses.asdict(submission))}" if submission else ""
    with open(path(folder), "a", encoding="utf-8", opener=_not_through_a_link) as file:
        file.write(f"{job} {restarts} {socket.gethostname()}{more}\n")


def _not_through_a_link(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)


def record_start(run: Path, jobs: Mapping[str, int]) -> None:
    """Add a line for the Slurm job that starts the run, if one does; for `jobs` see `store.run_lock.Owner`."""
    for name, restarts in jobs.items():
        if name.startswith(_SLURM):
            append(run, name.removeprefix(_SLURM), str(restarts))


def read(folder: Path) -> dict[str, int]:
    """How often each job was restarted, as far as it was recorded, by its id; the newest job is last."""
    jobs: dict[str, int] = {}
    for job, restarts, *_ in _lines(folder):
        jobs[job] = max(int(restarts) if restarts.isdecimal() else 0, jobs.pop(job, 0))
    return jobs


def submissions(folder: Path) -> dict[str, Submission]:
    """What `submit` knew of the jobs that it has submitted, by their ids; the newest is last."""
    submissions_by_job: dict[str, Submission] = {}
    for job, _, _, *more in _lines(folder):
        try:
            submissions_by_job[job] = Submission(**json.loads(more[0]))
        except (IndexError, ValueError, TypeError):
            continue  # of a start, or not ours
    return submissions_by_job


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
