"""What Slurm says about jobs, beside what the folders of their runs say: the lines of `pflmpi status`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pflmpi.cluster import jobs as slurm
from pflmpi.cluster.folders import by_working_directory, cells, jobs_in, located, run_of, runs_below
from pflmpi.cluster.jobs import Job
from pflmpi.cluster.run_status import run_status
from pflmpi.cluster.status_text import headline, progress_lines, progress_summary
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.store import job_file, run_lock
from pflmpi.text import counted

_FORGOTTEN = "Slurm forgets a job some minutes after its end"


def my_jobs(environ: Mapping[str, str]) -> Iterator[str]:
    """Status lines of this user's jobs.

    Raises:
        ConfigError: there is no Slurm here; the same holds for `one_job`.
        NoAnswer: it does not answer; likewise.
    """
    queue = slurm.queue(environ)
    jobs = located(queue, by_working_directory(queue))
    if not jobs:
        yield f"no job of yours is known to work on a run ({_FORGOTTEN}); for a run: pflmpi status RUN"
    yield from _blocks(_current(jobs))
    others = sum(job.active or job.waiting for job in queue) - sum(job.active or job.waiting for job in jobs)
    if others:
        yield (
            f"{counted(others, 'other job')} of yours: the folders below where they were submitted name none of them "
            "in a jobs.txt"
        )


def one_job(name: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Status lines of a job, a task of an array, or an array."""

    def named(jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if name in (job.id, job.array, job.number)]

    jobs = named(slurm.queue(environ))
    here = Job(id=name, number=name.partition("_")[0], state="", directory=str(Path().resolve()))
    folders = [*by_working_directory([*jobs, here])]
    if not jobs:
        jobs = named(slurm.accounted([name], environ))
    if jobs:
        places = {job.id: job for job in located(jobs, folders)}
        yield from _blocks([places.get(job.id, job) for job in jobs])
    elif known := located([here], folders):
        assert known[0].folder is not None
        yield f"Slurm knows no job {name} any more; by its jobs.txt it was for {known[0].folder}"
        yield from one_folder(known[0].folder, environ)
    else:
        raise ConfigError(
            f"Slurm knows no job {name}: it never existed, or it has ended ({_FORGOTTEN}); "
            f"the folder of its run still shows its progress: pflmpi status RUN (if that is its name: ./{name})"
        )


def one_folder(folder: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Status lines of a run, or of the runs of a sweep, even if Slurm is missing or does not answer."""
    jobs: list[Job] = []
    note = ""
    try:
        jobs = jobs_in(folder, slurm.queue(environ))
        newest = list(job_file.read(folder))[-1:]
        jobs = jobs or jobs_in(folder, slurm.accounted(newest, environ))
        note = "" if jobs else f"no job of yours runs it, as far as Slurm knows ({_FORGOTTEN})"
    except ConfigError:
        pass  # there is no Slurm here
    except slurm.NoAnswer as error:
        note = error.why  # what else to do is done: a run has been named
    if writer := run_lock.owner(folder):
        note = f"being written by {writer}"
    state, runs = run_status(folder), runs_below(folder)
    if jobs:
        yield from _blocks(_current(jobs))
    elif state is not None:
        if state.problem:
            raise CheckpointError(state.problem)
        yield f"{folder}: {state.title}"
        yield from (f"  {line}" for line in progress_lines(state, None))
    elif not runs:
        raise ConfigError(
            f"{folder} is not the folder of a run (it has no config.yaml of one) or of a sweep with runs, "
            "and not the id of a job, such as 123 or 123_4; name the folder that `pflmpi run` or `submit` printed"
        )
    if runs and not any(cells(job) for job in jobs):
        yield f"runs in {folder}:"
        yield from (f"  {run.relative_to(folder)}  {progress_summary(run_status(run), None)}" for run in runs)
    if note:
        yield f"  {note}"


def _current(jobs: Sequence[Job]) -> list[Job]:
    """The jobs without ended ones whose run has a newer job."""
    newest = {run_of(job): job for job in jobs}
    return [job for job in jobs if job.active or job.waiting or newest[run := run_of(job)] is job or run is None]


def _blocks(jobs: Sequence[Job]) -> Iterator[str]:
    """Lines of each job, with the tasks of an array together."""
    arrays: dict[str, list[Job]] = {}
    for job in jobs:
        arrays.setdefault(job.array or job.id, []).append(job)
    for tasks in arrays.values():
        yield from _array(tasks) if len(tasks) > 1 or len(tasks[0].tasks) > 1 else _block(tasks[0])


def _block(job: Job) -> Iterator[str]:
    yield headline(job)
    run = run_of(job)
    if run is None:
        yield f"  a task of the sweep in {job.folder}" if job.folder else "  its run is unknown: no jobs.txt names it"
    elif state := run_status(run, _since(job)):
        yield f"  {run}: {state.title}"
        yield from (f"  {line}" for line in progress_lines(state, job))
    else:
        yield f"  {run}: {'not begun' if job.active or job.waiting else 'there is no run'}"
    if job.log is not None:
        yield f"  log: {job.log}"


def _array(jobs: Sequence[Job]) -> Iterator[str]:
    """A headline and a line per task; tasks that wait together share one, unless it is known what they run."""
    array, listing = jobs[0].array, cells(jobs[0])
    sweep = jobs[0].folder if listing else None
    counts: dict[str, int] = {}
    for job in jobs:
        counts[job.state] = counts.get(job.state, 0) + len(job.tasks)
    yield f"job {array}, an array: {', '.join(f'{count} {state}' for state, count in counts.items())}"
    if sweep:
        yield f"  the sweep in {sweep}"
    for job in jobs:
        what = f"{job.state} ({job.reason})" if job.reason else job.state
        log = f"  log: {job.log}" if job.log is not None and not job.waiting and job.state != "COMPLETED" else ""
        if not listing:
            progress = progress_summary(run_status(job.folder, _since(job)), job) if job.folder else ""
            yield f"  {job.id}  {what}{f'  {job.folder}  {progress}' * bool(progress)}{log}"
        for task in job.tasks if listing else ():
            cell = f"  {_summary(listing[task], sweep, job)}" if task in listing else ""
            yield f"  {array}_{task}  {what}{cell}{log}"
    tasks = {task for job in jobs for task in job.tasks}
    for task, run in listing.items():
        if task not in tasks:  # it was done before, or Slurm has forgotten it
            yield f"  {array}_{task}  no longer in the queue  {_summary(run, sweep, None)}"


def _summary(run: Path, sweep: Path | None, job: Job | None) -> str:
    assert sweep is not None, "cells are known by the sweep's folder"
    status = run_status(run, None if job is None else _since(job))
    return f"{run.relative_to(sweep)}  {progress_summary(status, job)}"


def _since(job: Job) -> float | None:
    """Start of an active job, in seconds since the epoch; None for others."""
    return time.time() - job.seconds if job.active else None
