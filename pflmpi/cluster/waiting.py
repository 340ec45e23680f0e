"""Waiting for jobs, and for the processes that write runs."""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from pflmpi.cluster import jobs as slurm
from pflmpi.cluster.jobs import NoAnswer, find_job_folders, find_jobs_in, find_planned_runs, find_runs_below
from pflmpi.cluster.run_status import read_run_status
from pflmpi.cluster.status import drop_superseded, find_jobs_of, find_named_jobs, no_run_error
from pflmpi.errors import ConfigError, RunError, Stopped
from pflmpi.store import events_file, job_file, run_lock
from pflmpi.store.runs import is_run
from pflmpi.sweep.lock import is_sweeping

_GRACE = 20.0  # seconds within which a launcher may start the ranks of a run again
_PAUSE = 2.0  # seconds between two looks at the runs
_QUEUE_PAUSE = 16.0  # seconds between two queries of Slurm's queue while runs are awaited


class Writers:
    """Tells which runs are being written, by their locks; the lock of another host counts while it is being touched."""

    def __init__(self) -> None:
        self._queued: dict[Path, tuple[float, bool]] = {}
        self._seen: dict[Path, float] = {}
        self._touched: dict[Path, float] = {}

    def is_writing(self, run: Path) -> bool:
        """Whether a process writes the run, or did until a moment ago: its ranks may be starting again."""
        owner, now = run_lock.find_owner(run), time.monotonic()
        if owner is not None:
            with suppress(OSError):
                touched = run_lock.read_mtime(run_lock.path(run))
                if owner.near() or self._touched.get(run) != touched:
                    self._seen[run], self._touched[run] = now, touched
        patience = _GRACE if owner is None else run_lock.SILENCE
        return now - self._seen.get(run, -patience) < patience

    def may_begin(self, folder: Path, environ: Mapping[str, str]) -> bool:
        """Whether a run may still begin in a folder or below it, by the lock of its sweep and Slurm's queue."""
        now, (queried, is_queued) = time.monotonic(), self._queued.get(folder, (-inf, False))
        is_new = folder.is_dir() and not any(folder.iterdir())
        if is_new or is_sweeping(folder):
            return True
        if is_done(folder):
            return False
        if now - queried > _QUEUE_PAUSE:
            is_queued = _is_queued(folder, environ)
            self._queued[folder] = now, is_queued
        return is_queued

    def are_writing(self, folders: Sequence[Path]) -> bool:
        """Whether a process writes a run in or below some folders that is not done, or sweeps in one of them."""
        runs = [run for folder in folders for run in find_runs_below(folder) or [folder]]
        is_written = [not is_done(run) and self.is_writing(run) for run in runs]  # all of them are asked
        return any(is_written) or any(map(is_sweeping, folders))


def _is_queued(folder: Path, environ: Mapping[str, str]) -> bool:
    """Whether a job in the queue works on the runs of a folder; without Slurm here, whether a job has yet to start."""
    runs = find_runs_below(folder)
    if not any(job_file.read_restarts(place) for path in (folder, *runs) for place in slurm.list_job_folders(path)):
        return False
    try:
        queue = slurm.query_queue(environ)
    except NoAnswer:
        return True
    except ConfigError:  # there is no Slurm here
        return job_file.path(folder).exists() and not (runs or is_run(folder))
    return any(job.may_run for path in (folder, *runs) for job in find_jobs_in(path, queue))


def is_done(run: Path, rounds: int = 0) -> bool:
    """Whether a run has ended as its config.yaml says, and that says at least so many rounds."""
    state = read_run_status(run)
    return state is not None and state.done and state.rounds >= rounds


def _submitted_rounds(run: Path, jobs: Collection[str]) -> int:
    """Rounds that a run was submitted for in some jobs: what lies in its folder may be a shorter run of before."""
    return max((job.rounds for id, job in job_file.read_submissions(run).items() if id in jobs), default=0)


def wait(jobs: Collection[str], folders: Sequence[Path], environ: Mapping[str, str], of_sweep: bool = False) -> int:
    """Wait until jobs, or the processes that write runs, have ended; return the exit code of the run.

    The code of a job is Slurm's, of several jobs that of the last; the code of another process is the one in its events
    (`output.events`), or 3 without events.

    Args:
        jobs: ids of the jobs.
        folders: of the runs, or of sweeps, whose cells are listed when all has ended: they appear as they start.
        of_sweep: whether these are runs of a sweep, as cells always are; then 0 if all are done and no job has failed,
            75 if all others were stopped, 1 otherwise.
    """
    ended = [job for name in jobs for job in slurm.wait(name, environ)]
    writers = Writers()
    while not jobs and writers.are_writing(folders):
        time.sleep(_PAUSE)
    runs = [run for folder in folders for run in find_planned_runs(folder) or [folder]]
    of_sweep = of_sweep or runs != [*folders]
    unfinished = [run for run in runs if not is_done(run, _submitted_rounds(run, jobs))]
    failed = [job for job in ended if job.state != "COMPLETED"]
    if not unfinished and not (failed and (of_sweep or not runs)):
        return 0
    codes = [job.exit_code or RunError.exit_code for job in failed]
    if not jobs:
        codes = [events_file.exit_code(run) or RunError.exit_code for run in unfinished]
    if of_sweep:
        return Stopped.exit_code if {*codes} == {Stopped.exit_code} else 1
    return codes[-1] if codes else RunError.exit_code


def _submitted_cells(array: str, jobs: Sequence[slurm.Job]) -> list[Path]:
    """The runs that an array was submitted for, also those whose tasks Slurm has forgotten; none for another job."""
    submissions = ((sweep, job_file.read_submissions(sweep).get(array)) for sweep in find_job_folders(jobs))
    return [sweep / cell for sweep, submission in submissions if submission for cell in submission.cells]


def wait_for(target: Path | str, environ: Mapping[str, str]) -> int:
    """`wait` for a job, or for the jobs and processes of a run, a sweep or a folder of runs."""
    if isinstance(target, str):
        slurm.wait(target, environ)  # then the tasks of an array are known to work in their runs, not in the sweep
        jobs = find_named_jobs(target, environ)
        cells = _submitted_cells(target, jobs)
        folders = [*dict.fromkeys(cells or [job.folder for job in jobs if job.folder is not None])]
        return wait([target] if jobs[0].state else [], folders, environ, bool(cells) or len(folders) > 1)
    folder, jobs = target.resolve(), find_jobs_of(target, environ)[0]
    is_busy = run_lock.find_owner(folder) is not None or is_sweeping(folder)
    if not (jobs or is_busy or find_planned_runs(folder) or is_run(folder)):
        raise no_run_error(target)
    last = [*job_file.read_restarts(folder)][-1:]  # what earlier arrays have left undone, their cells show

    def counts(job: slurm.Job) -> bool:
        return job.may_run or not (is_busy or (last and {job.array, job.number}.isdisjoint(last)))

    numbers = dict.fromkeys(job.array or job.number for job in filter(counts, drop_superseded(jobs)))
    return wait(numbers, [folder], environ)
