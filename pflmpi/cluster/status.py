"""What Slurm says about jobs, beside what the folders of their runs say: the lines of `pflmpi status`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pflmpi.cluster import queue
from pflmpi.cluster.jobs import Job, cells_file
from pflmpi.cluster.run_status import run_status, runs_below
from pflmpi.cluster.status_text import headline, progress_lines, progress_summary
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.store.lock import run_lock

_FORGOTTEN = "Slurm forgets a job some minutes after its end"


def my_jobs(environ: Mapping[str, str]) -> Iterator[str]:
    """Status lines of this user's jobs.

    Raises:
        ConfigError: there is no Slurm here; the same holds for `one_job`.
        NoAnswer: it does not answer; likewise.
    """
    # An ended job that names no run and has no log, such as srun's from a shell, has nothing to show.
    jobs = [job for job in queue.mine(environ) if job.active or job.waiting or job.folder or job.log]
    if not jobs:
        yield f"none of your jobs is one of pflmpi's ({_FORGOTTEN}); for a run: pflmpi status RUN"
    yield from _blocks(_current(jobs))


def one_job(name: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Status lines of a job, a task of an array, or an array."""
    jobs = queue.jobs(name, environ)
    if jobs:
        yield from _blocks(jobs)
        return
    folder = _folder_by_log(name)
    if folder is None:
        raise ConfigError(
            f"Slurm knows no job {name}: it never existed, or it has ended ({_FORGOTTEN}); "
            f"the folder of its run still shows its progress: pflmpi status RUN (if that is its name: ./{name})"
        )
    yield f"Slurm knows no job {name} any more; by its log it was for {folder}"
    yield from one_folder(folder, environ)


def one_folder(folder: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Status lines of a run, or of the runs of a sweep, even if Slurm is missing or does not answer."""
    jobs, note = [], ""
    try:
        near = queue.mine(environ, folder)
        jobs = [job for job in near if folder.resolve() in (_run(job), job.folder)]
        perhaps = [job for job in near if job.active and _run(job) is None]
        note = "" if jobs else f"no job of yours runs it, as far as Slurm knows ({_FORGOTTEN})"
        if perhaps and not jobs:
            note = f"job {perhaps[0].id} is {perhaps[0].state} and works in {perhaps[0].folder}, perhaps on this run"
    except ConfigError:
        pass  # there is no Slurm here
    except queue.NoAnswer as error:
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
    if runs and not any(_cells(job) for job in jobs):
        yield f"runs in {folder}:"
        yield from (f"  {run.relative_to(folder)}  {progress_summary(run_status(run), None)}" for run in runs)
    if note:
        yield f"  {note}"


def _folder_by_log(name: str) -> Path | None:
    """The folder that `submit` named the log of a job after, if it is where runs and sweeps usually are."""
    for parent in (Path("runs"), Path("sweeps"), Path()):
        for pattern in (f".{name}.log", f".{name}_*.log"):
            for log in sorted(parent.glob(f"*{pattern}")):
                folder = log.with_name(log.name.rpartition(f".{name}")[0])
                if folder.is_dir():
                    return folder
    return None


def _current(jobs: Sequence[Job]) -> list[Job]:
    """The jobs without ended ones whose run has a newer job."""
    newest = {_run(job): job for job in jobs}
    return [job for job in jobs if job.active or job.waiting or newest[run := _run(job)] is job or run is None]


def _blocks(jobs: Sequence[Job]) -> Iterator[str]:
    """Lines of each job, with the tasks of an array together."""
    arrays: dict[str, list[Job]] = {}
    for job in jobs:
        arrays.setdefault(job.array or job.id, []).append(job)
    for tasks in arrays.values():
        yield from _array(tasks) if len(tasks) > 1 or len(tasks[0].tasks) > 1 else _block(tasks[0])


def _block(job: Job) -> Iterator[str]:
    yield headline(job)
    run = _run(job)
    if run is None:
        unknown = "its run is unknown: it has no comment of pflmpi's"
        yield f"  a task of the sweep in {job.folder}" if job.folder else f"  {unknown}"
    elif state := run_status(run, _since(job)):
        yield f"  {run}: {state.title}"
        yield from (f"  {line}" for line in progress_lines(state, job))
    else:
        yield f"  {run}: {'not begun' if job.active or job.waiting else 'there is no run'}"
    if job.log is not None:
        yield f"  log: {job.log}"


def _array(jobs: Sequence[Job]) -> Iterator[str]:
    """A headline and a line per task; tasks that wait together share one, unless it is known what they run."""
    array, sweep, cells = jobs[0].array, jobs[0].folder, _cells(jobs[0])
    counts: dict[str, int] = {}
    for job in jobs:
        counts[job.state] = counts.get(job.state, 0) + len(job.tasks)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    yield f"job {array}, an array: {states}"
    yield f"  the sweep in {sweep}" if sweep else "  its sweep is unknown: it has no comment of pflmpi's"
    for job in jobs:
        what = f"{job.state} ({job.reason})" if job.reason else job.state
        log = f"  log: {job.log}" if job.log is not None and not job.waiting and job.state != "COMPLETED" else ""
        if not cells:
            yield f"  {job.id}  {what}{log}"
        for task in job.tasks if cells else ():
            cell = f"  {_summary(cells[task], sweep, job)}" if task in cells else ""
            yield f"  {array}_{task}  {what}{cell}{log}"
    known = {task for job in jobs for task in job.tasks}
    for task, run in cells.items():
        if task not in known:  # it was done before, or Slurm has forgotten it
            yield f"  {array}_{task}  no longer in the queue  {_summary(run, sweep, None)}"


def _summary(run: Path, sweep: Path | None, job: Job | None) -> str:
    assert sweep is not None, "cells are known by the sweep's folder"
    status = run_status(run, None if job is None else _since(job))
    return f"{run.relative_to(sweep)}  {progress_summary(status, job)}"


def _run(job: Job) -> Path | None:
    """Folder of a job's run; for a task of an array only if it is known what it runs."""
    return job.folder if not job.array else _cells(job).get(-1 if job.task is None else job.task)


def _cells(job: Job) -> dict[int, Path]:
    """The run of each task of the job's array; empty for other jobs, and if `submit` has not recorded them."""
    if not job.array or job.folder is None:
        return {}
    try:
        lines = cells_file(job.folder, job.array).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {task: job.folder / line for task, line in enumerate(lines)}


def _since(job: Job) -> float | None:
    """Start of an active job, in seconds since the epoch; None for others."""
    return time.time() - job.seconds if job.active else None
