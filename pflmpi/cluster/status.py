"""What Slurm says of jobs, beside what the folders of their runs say: the lines of `pflmpi status`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pflmpi.cluster import queue
from pflmpi.cluster.queue import GOING_ON, WAITING, Job
from pflmpi.cluster.run_status import runs_below, standing
from pflmpi.cluster.status_text import course, headline, in_short
from pflmpi.errors import ConfigError, PflmpiError

_FORGOTTEN = "Slurm forgets a job some minutes after its end"


def my_jobs(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield what there is to say of this user's jobs.

    Raises:
        PflmpiError: there is no Slurm here, or it does not answer; so for `one_job`.
    """
    # An ended job that names no run and has no log, such as srun's from a shell, has nothing to show.
    jobs = [job for job in queue.mine(environ) if _alive(job) or queue.run_of(job.comment) or job.log]
    if not jobs:
        yield f"none of your jobs is one of pflmpi's ({_FORGOTTEN}); a run says itself how far it is: pflmpi status RUN"
    yield from _blocks(_current(jobs))


def one_job(name: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield what there is to say of a job, a task of an array, or an array."""
    jobs = queue.jobs(name, environ)
    if jobs:
        yield from _blocks(jobs)
        return
    folder = _folder_of_forgotten(name)
    if folder is None:
        raise ConfigError(
            f"Slurm knows no job {name}: there was none, or it has ended ({_FORGOTTEN}); "
            f"the folder of its run still says how far it is: pflmpi status RUN (one that is called so: ./{name})"
        )
    yield f"Slurm knows no job {name} any more; by its log it was for {folder}"
    yield from one_folder(folder, environ)


def one_folder(folder: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield what there is to say of a run, or of the runs of a sweep, also if Slurm is missing or does not answer."""
    jobs, note = [], ""
    try:
        jobs = [
            job for job in queue.mine(environ, folder) if folder.resolve() in (_run(job), queue.run_of(job.comment))
        ]
        note = "" if jobs else f"no job of yours makes it, as far as Slurm knows ({_FORGOTTEN})"
    except ConfigError:
        pass  # there is no Slurm here
    except PflmpiError as error:
        note = str(error)
    state, runs = standing(folder), runs_below(folder)
    if jobs:
        yield from _blocks(_current(jobs))
    elif state is not None:
        yield f"{folder}: {state.title}"
        yield from (f"  {line}" for line in course(state, None))
    elif not runs:
        raise ConfigError(
            f"{folder} is not the folder of a run (it has no config.yaml of one) or of a sweep with runs, "
            "and not the id of a job, such as 123 or 123_4; name the folder that `pflmpi run` or `submit` printed"
        )
    if runs and not any(_cells(job) for job in jobs):
        yield f"runs in {folder}:"
        yield from (f"  {run.relative_to(folder)}  {in_short(standing(run), None)}" for run in runs)
    if note:
        yield f"  {note}"


def _folder_of_forgotten(name: str) -> Path | None:
    """The folder that `submit` named the log of a job after, if it is where runs and sweeps are."""
    for place in (Path("runs"), Path("sweeps"), Path()):
        for pattern in (f".{name}.log", f".{name}_*.log"):
            for log in sorted(place.glob(f"*{pattern}")):
                folder = log.with_name(log.name.rpartition(f".{name}")[0])
                if folder.is_dir():
                    return folder
    return None


def _current(jobs: Sequence[Job]) -> list[Job]:
    """The jobs without those that have ended and whose run has a newer job."""
    newest = {_run(job): job for job in jobs}
    return [job for job in jobs if _alive(job) or newest[run := _run(job)] is job or run is None]


def _blocks(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield what there is to say of each job, and of each array once."""
    arrays: dict[str, list[Job]] = {}
    for job in jobs:
        arrays.setdefault(job.array or job.id, []).append(job)
    for tasks in arrays.values():
        yield from _array(tasks) if len(tasks) > 1 or len(queue.tasks_of(tasks[0])) > 1 else _block(tasks[0])


def _block(job: Job) -> Iterator[str]:
    yield headline(job)
    run = _run(job)
    if run is None:
        sweep = queue.run_of(job.comment)
        yield (
            f"  a task of the sweep in {sweep}"
            if sweep
            else "  which run it makes is not known: it has no comment of pflmpi's"
        )
    elif state := standing(run, _since(job)):
        yield f"  {run}: {state.title}"
        yield from (f"  {line}" for line in course(state, job))
    else:
        yield f"  {run}: {'not begun' if _alive(job) else 'no run is there'}"
    if job.log is not None:
        yield f"  log: {job.log}"


def _array(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield a headline and a line per task; those that wait together share one, unless it is known what they run."""
    array, sweep, cells = jobs[0].array, queue.run_of(jobs[0].comment), _cells(jobs[0])
    counts: dict[str, int] = {}
    for job in jobs:
        counts[job.state] = counts.get(job.state, 0) + len(queue.tasks_of(job))
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    yield f"job {array}, an array: {states}"
    yield f"  the sweep in {sweep}" if sweep else "  which sweep it makes is not known: it has no comment of pflmpi's"
    for job in jobs:
        what = f"{job.state} ({job.reason})" if job.reason else job.state
        log = f"  log: {job.log}" if job.log is not None and job.state not in (*WAITING, "COMPLETED") else ""
        if not cells:
            yield f"  {job.id}  {what}{log}"
        for task in queue.tasks_of(job) if cells else ():
            run = cells.get(task)
            cell = f"  {run.relative_to(sweep)}  {in_short(standing(run, _since(job)), job)}" if run and sweep else ""
            yield f"  {array}_{task}  {what}{cell}{log}"
    known = {task for job in jobs for task in queue.tasks_of(job)}
    for task, run in cells.items():
        if task not in known and sweep is not None:  # it was done before, or Slurm has forgotten it
            yield f"  {array}_{task}  no such task now  {run.relative_to(sweep)}  {in_short(standing(run), None)}"


def _alive(job: Job) -> bool:
    """Whether a job waits or goes on."""
    return job.state in (*GOING_ON, *WAITING)


def _run(job: Job) -> Path | None:
    """Folder of the run that a job makes; of a task only if it is known what it runs."""
    return queue.run_of(job.comment) if not job.array else _cells(job).get(-1 if job.task is None else job.task)


def _cells(job: Job) -> dict[int, Path]:
    """The run of each task of the job's array; none for other jobs, and where `submit` has not written them down."""
    sweep = queue.run_of(job.comment)
    if not job.array or sweep is None:
        return {}
    try:
        lines = queue.cells_file(sweep, job.array).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {task: sweep / line for task, line in enumerate(lines)}


def _since(job: Job) -> float | None:
    """When the job started, in seconds since the epoch; None if it does not go on."""
    return time.time() - job.seconds if job.state in GOING_ON else None
