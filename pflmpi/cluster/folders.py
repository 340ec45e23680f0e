"""Which job works in which folder, by the jobs.txt of runs and sweeps."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pflmpi import regular_file
from pflmpi.cluster.jobs import Job
from pflmpi.store import job_file

_CELL = "*/*/seed*"  # a run below its sweep
# Where runs, sweeps, points of scaling experiments and cells usually are, below the folder where a job was submitted.
_USUAL = ("*", "*/*", "scaling/*/ranks-*", f"sweeps/*/{_CELL}")


def runs_below(sweep: Path, file: str = "config.yaml") -> list[Path]:
    """Folders of the runs of a sweep that have a file, sorted by name; a run, whose folders may be links, has none."""
    cells = () if os.path.lexists(sweep / "config.yaml") else sweep.glob(f"{_CELL}/{file}")
    return sorted(path.parent for path in cells)


def cells_file(sweep: Path, array: str) -> Path:
    """File that lists what an array runs: one line per task, from 0, with its run's folder relative to the sweep's.

    `submit` writes it, because nothing that Slurm shows of a task says which cell of a table it runs.
    """
    return sweep / f"array_{array}.txt"


def cells(job: Job) -> dict[int, Path]:
    """The run of each task of the job's array; empty for other jobs, and if `submit` has not recorded them."""
    if not job.array or job.folder is None:
        return {}
    try:
        lines = regular_file.read(cells_file(job.folder, job.array)).decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    below = {task: line for task, line in enumerate(lines) if not {"..", "/"} & {*Path(line).parts}}
    return {task: job.folder / line for task, line in below.items()}


def run_of(job: Job) -> Path | None:
    """Folder of a job's run; None if unknown, and for tasks of an array that wait together."""
    runs = cells(job)
    return runs.get(job.tasks[0] if len(job.tasks) == 1 else -1) if runs else job.folder


def by_working_directory(jobs: Iterable[Job]) -> Iterator[Path]:
    """Folders where jobs may work: the usual ones below where they were submitted, and that of their log's name."""
    for directory in dict.fromkeys(job.directory for job in jobs if job.directory):
        for pattern in _USUAL:
            yield from sorted(path.parent for path in Path(directory).glob(f"{pattern}/jobs.txt"))
    for job in jobs:
        if job.log is not None and job.log.name.endswith(end := f".{job.id}.log"):
            yield job.log.with_name(job.log.name.removesuffix(end))


def located(jobs: Iterable[Job], folders: Iterable[Path]) -> list[Job]:
    """The jobs that the jobs.txt of one of the folders names, each with its folder."""
    places: dict[str, Path] = {}
    for folder in folders:
        for number in job_file.read(folder):
            if cells_file(folder, number).exists():
                places[f"{number}_"] = folder  # an array, of which all tasks work there
            else:
                places.setdefault(number, folder)
    pairs = ((job, places.get(f"{job.array or job.number}_") or places.get(job.number)) for job in jobs)
    return [replace(job, folder=folder) for job, folder in pairs if folder]


def jobs_in(folder: Path, jobs: Sequence[Job]) -> list[Job]:
    """Those of the jobs that work on a run, or on a sweep and its runs, with how often they have been restarted."""
    folder = folder.resolve()
    sweeps = [place for place in folder.parents[:3] if any(place.glob("array_*.txt"))]  # that it may be a cell of
    folders = [*sweeps, *runs_below(folder, "jobs.txt"), folder]
    restarts = job_file.read(folder)
    here = (job for job in located(jobs, folders) if job.folder not in sweeps or run_of(job) == folder)
    return [replace(job, restarts=max(job.restarts, restarts.get(job.number, 0))) for job in here]
