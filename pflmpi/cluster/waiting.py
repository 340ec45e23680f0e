"""Waiting for jobs, and for the processes that write runs."""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pflmpi.cluster import jobs as slurm
from pflmpi.cluster.jobs import find_runs_below
from pflmpi.cluster.run_status import read_run_status
from pflmpi.cluster.status import drop_superseded, find_jobs_of, find_named_jobs, no_run_error
from pflmpi.errors import RunError, Stopped
from pflmpi.store import config_file, events_file, run_lock

_GRACE = 20.0  # seconds within which a launcher may start the ranks of a run again
_PAUSE = 2.0  # seconds between two looks at the runs


class Writers:
    """Tells which runs are being written, by their locks; the lock of another host counts while it is being touched."""

    def __init__(self) -> None:
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


def is_done(run: Path) -> bool:
    state = read_run_status(run)
    return state is not None and state.done


def wait(jobs: Collection[str], runs: Sequence[Path], environ: Mapping[str, str], of_sweep: bool) -> int:
    """Wait until jobs, and the processes that write runs, have ended; return the exit code of the run.

    The code of a job is Slurm's, of several jobs that of the last; the code of another process is the one in its events
    (`output.events`), or 3 without events.

    Args:
        jobs: ids of the jobs.
        of_sweep: whether these are runs of a sweep; then 0 if all are done, 75 if all others were stopped, 1 otherwise.
    """
    ended = [job for name in jobs for job in slurm.wait(name, environ)]
    writers = Writers()
    while not jobs and any([not is_done(run) and writers.is_writing(run) for run in runs]):  # a list: ask all of them
        time.sleep(_PAUSE)
    unfinished = [run for run in runs if not is_done(run)]
    if not unfinished:
        return 0
    codes = [job.exit_code or RunError.exit_code for job in ended if job.state != "COMPLETED"]
    if not jobs:
        codes = [events_file.exit_code(run) or RunError.exit_code for run in unfinished]
    if of_sweep:
        return Stopped.exit_code if {*codes} == {Stopped.exit_code} else 1
    return codes[-1] if codes else RunError.exit_code


def wait_for(target: Path | str, environ: Mapping[str, str]) -> int:
    """`wait` for a job, or for the jobs and processes of a run, a sweep or a folder of runs."""
    if isinstance(target, str):
        jobs = find_named_jobs(target, environ)
        runs = [job.folder for job in jobs if job.folder is not None]
        cells = [cell for run in runs for cell in find_runs_below(run)]
        return wait([target] if jobs[0].state else [], cells or runs, environ, bool(cells))
    jobs, cells = find_jobs_of(target, environ)[0], find_runs_below(target.resolve())
    if not (jobs or cells or config_file.path(target).exists() or run_lock.find_owner(target)):
        raise no_run_error(target)
    newest = [] if run_lock.find_owner(target) else drop_superseded(jobs)
    numbers = dict.fromkeys(job.array or job.number for job in [job for job in jobs if job.in_queue] or newest)
    return wait(numbers, cells or [target], environ, bool(cells))
