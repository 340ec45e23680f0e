"""RUN/jobs.txt: the Slurm jobs of a run or a sweep, a line for each start: job id, restart count, host.

`submit` writes the first line, with `-` for the count, since a job that waits has not started.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from pflmpi import regular_file

_SLURM = "Slurm job "


def path(folder: Path) -> Path:
    """File of a run's folder, or of a sweep's."""
    return folder / "jobs.txt"


def append(folder: Path, job: str, restarts: str = "-") -> None:
    """Add a line; the folder exists."""
    with open(path(folder), "a", encoding="utf-8", opener=_not_through_a_link) as file:
        file.write(f"{job} {restarts} {socket.gethostname()}\n")


def _not_through_a_link(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)


def record_start(run: Path, jobs: Mapping[str, int]) -> None:
    """Add a line for the Slurm job that starts the run, if one does; for `jobs` see `store.run_lock.Owner`."""
    for name, restarts in jobs.items():
        if name.startswith(_SLURM):
            append(run, name.removeprefix(_SLURM), str(restarts))


def read(folder: Path) -> dict[str, int]:
    """How often each job was restarted, as far as it was recorded, by its id; the newest job is last."""
    try:
        lines = [line.split() for line in regular_file.read(path(folder)).decode(errors="replace").splitlines()]
    except OSError:
        return {}
    jobs: dict[str, int] = {}
    for job, restarts in ((line[0], line[1]) for line in lines if len(line) == 3 and line[0].isdecimal()):
        jobs[job] = max(int(restarts) if restarts.isdecimal() else 0, jobs.pop(job, 0))
    return jobs
