"""Status of jobs beside that of their runs, as lines and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pflmpi.cluster import jobs as slurm
from pflmpi.cluster.job_log import find_last_error, is_out_of_memory
from pflmpi.cluster.jobs import (
    Job,
    assign_folders,
    find_job_folders,
    find_jobs_in,
    find_last_errors,
    find_planned_runs,
    find_runs_below,
)
from pflmpi.cluster.run_status import RunStatus, format_progress, read_run_status, summarize_progress
from pflmpi.config import yaml_file
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.learning.main_measure import ACCURACY
from pflmpi.store import job_file, run_lock
from pflmpi.text import format_bytes, pluralize


def format_headline(job: Job) -> str:
    """State, reason, nodes and restarts of a job in one line."""
    words = [f"job {job.id} {job.state}"]
    if job.active:
        words.append(f"on {_format_nodes(job)} ({job.node_list})")
    elif job.waiting:
        words.append(f"({job.reason or 'no reason given'}), asks for {_format_nodes(job)}")
        words += [f"and is expected to start at {job.start}"] if job.start else []
    else:
        words += [f"({job.reason})"] if job.reason not in ("", job.state) else []
        words += [f"with exit code {job.exit_code}"] if job.exit_code else []
        words += [f"on {_format_nodes(job)} ({job.node_list})"] if job.node_list else []
    return f"{' '.join(words)}, {pluralize(job.restarts, 'restart')}"


def _format_nodes(job: Job) -> str:
    return f"{job.nodes} node{'s' * (job.nodes != '1')}"


_FORGOTTEN = "Slurm forgets a job some minutes after its end"


def describe_my_jobs(environ: Mapping[str, str]) -> Iterator[str]:
    """Status lines of this user's jobs.

    Raises:
        ConfigError: there is no Slurm here; the same holds for `describe_job`.
        NoAnswer: it does not answer; likewise.
    """
    queue = slurm.query_queue(environ)
    jobs = assign_folders(queue, find_job_folders(queue))
    if not jobs:
        yield f"no job of yours is known to work on a run ({_FORGOTTEN}); for a run: pflmpi status RUN"
    yield from _describe_jobs(drop_superseded(jobs))
    others = sum(job.in_queue for job in queue) - len({job.id for job in jobs if job.in_queue})
    if others:
        yield (
            f"{pluralize(others, 'other job')} of yours: the folders below where they were submitted name none of them "
            "in a jobs.txt"
        )


def describe_job(name: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Status lines of a job, a task of an array, or an array."""
    jobs = find_named_jobs(name, environ)
    if jobs[0].state:
        yield from _describe_jobs(jobs)
    else:
        assert jobs[0].folder is not None
        yield f"Slurm knows no job {name} any more; by its jobs.txt it was for {jobs[0].folder}"
        yield from describe_folder(jobs[0].folder, environ)


def find_named_jobs(name: str, environ: Mapping[str, str]) -> list[Job]:
    """The jobs with an id, once for each folder that they work in.

    A job that Slurm has forgotten has the state "", and its folder from a jobs.txt below the current directory.
    """
    jobs = slurm.find(name, environ)
    forgotten = Job(id=name, number=name.partition("_")[0], state="", directory=str(Path().resolve()))
    by_id: dict[str, list[Job]] = {}
    for job in assign_folders(jobs or [forgotten], find_job_folders([*jobs, forgotten])):
        by_id.setdefault(job.id, []).append(job)
    if not jobs and not by_id:
        raise ConfigError(
            f"Slurm knows no job {name}: it never existed, or it has ended ({_FORGOTTEN}); "
            f"the folder of its run still shows its progress: pflmpi status RUN (if that is its name: ./{name})"
        )
    return [with_folder for job in jobs or [forgotten] for with_folder in by_id.get(job.id, [job])]


def describe_folder(folder: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Status lines of a run, or of the runs of a sweep, even if Slurm is missing or does not answer."""
    jobs, note = find_jobs_of(folder, environ)
    if writer := run_lock.find_owner(folder):
        note = f"being written by {writer}"
    state, cells = read_run_status(folder), find_planned_runs(folder.resolve())
    ends = [] if jobs or writer else find_last_errors(folder)
    if jobs:
        yield from _describe_jobs(drop_superseded(jobs))
    elif state is not None or (ends and not cells):
        if state is not None and state.problem:
            raise CheckpointError(state.problem)
        yield f"{folder}: {state.title if state else 'not begun'}"
        yield from (f"  {line}" for line in (format_progress(state, None) if state else ()))
        for text, log in ends if state is None or not state.done else ():
            yield from _format_end(text, log)
    elif slurm.is_scaling_experiment(folder) and not cells:
        yield f"{folder}: a scaling experiment, of which no run has begun"
    elif not cells:
        raise no_run_error(folder)
    if (usage := job_file.compute_usage(folder)) and (usage.starts > 1 or not jobs):
        yield f"  used in {pluralize(usage.starts, 'start')}: {usage}"
    worked_on = {job.folder for job in jobs}
    if others := [cell for cell in cells if cell not in worked_on]:
        yield f"runs in {folder}:"
        yield from _describe_cells(others, folder.resolve(), ends)
    if note:
        yield f"  {note}"


def find_jobs_of(folder: Path, environ: Mapping[str, str]) -> tuple[list[Job], str]:
    """The jobs of a run or a sweep, and a note if there are none or Slurm does not answer."""
    jobs: list[Job] = []
    try:
        queue = slurm.query_queue(environ)
        submissions = job_file.read_submissions(folder)
        for newest in list(job_file.read_restarts(folder))[-1:]:
            tasks = {*submissions[newest].cells.values()} if newest in submissions else ()
            queue = slurm.add_forgotten(newest, queue, environ, tasks)
        jobs = find_jobs_in(folder, queue) or [
            job for run in find_runs_below(folder) for job in find_jobs_in(run, queue)
        ]
    except ConfigError:
        return [], ""  # there is no Slurm here
    except slurm.NoAnswer as error:
        return jobs, error.why  # without its remedy, to name a run: one has been named
    return jobs, "" if jobs else f"no job of yours runs it, as far as Slurm knows ({_FORGOTTEN})"


def no_run_error(folder: Path) -> ConfigError:
    """The error for a folder that is neither a run nor a sweep."""
    return ConfigError(
        f"{folder} is not the folder of a run (it has no config.yaml of one) or of a sweep with runs, "
        "and not the id of a job, such as 123 or 123_4; name the folder that `pflmpi run` or `submit` printed"
    )


def _describe_cells(cells: Sequence[Path], sweep: Path, ends: Sequence[tuple[str, Path]]) -> Iterator[str]:
    """A line for each cell, with the error that it ended with, and a line for each other error of the sweep's job."""
    cell_errors = set()
    for cell in cells:
        state = read_run_status(cell)
        line = f"  {cell.relative_to(sweep)}  {summarize_progress(state, None)}"
        log = Path(f"{cell}.log")
        if (state is None or not state.done) and run_lock.find_owner(cell) is None and (error := find_last_error(log)):
            cell_errors.add(error)
            line += f"; ended with: {error}  log: {log}"
        yield line
    for error, log in ends:
        if error and error not in cell_errors:
            yield f"  a task ended with: {error}  log: {log}"


def drop_superseded(jobs: Sequence[Job]) -> list[Job]:
    """The jobs without ended ones whose folder has a newer job or array."""
    newest = {job.folder: job.array or job.number for job in jobs}
    return [job for job in jobs if job.in_queue or newest[job.folder] == (job.array or job.number)]


def _describe_jobs(jobs: Sequence[Job]) -> Iterator[str]:
    """Lines of each job and its run; the tasks of an array, and the runs of one job, are shown together."""
    arrays: dict[str, list[Job]] = {}
    for job in jobs:
        arrays.setdefault(job.array or job.id, []).append(job)
    for tasks in arrays.values():
        yield from _describe_array(tasks) if len(tasks) > 1 or len(tasks[0].tasks) > 1 else _describe_job(tasks[0])


def _describe_job(job: Job) -> Iterator[str]:
    yield format_headline(job)
    if job.never_starts:
        yield f"  {job.never_starts}"
    if job.folder is None:
        yield "  its run is unknown: no jobs.txt names it"
    elif state := read_run_status(job.folder):
        yield f"  {job.folder}: {state.title}"
        yield from (f"  {line}" for line in format_progress(state, job))
    elif point := _describe_point(job.folder):
        yield f"  {job.folder}: {point}"
    elif job.array:
        yield f"  a task of the sweep in {job.folder}"
    else:
        yield f"  {job.folder}: {'not begun' if job.in_queue else 'there is no run'}"
    if job.seconds:
        yield f"  {_format_usage(job)}"
    error = _find_error(job)
    yield from (f"  {line}" for line in _format_memory_advice(job, error))
    if job.log is not None:
        yield from _format_end(error, job.log)


def _describe_point(folder: Path) -> str:
    """Progress of a point of a scaling experiment; "" for another folder."""
    try:
        repeats = yaml_file.read(folder.parent / "scale.yaml").get("repeats")
    except ConfigError:
        return ""
    done = sum(run is not None and run.done for run in map(read_run_status, find_runs_below(folder)))
    return f"a point of the scaling experiment in {folder.parent}, {done} of {repeats} repeats done"


def _format_usage(job: Job) -> str:
    """Node, core and GPU hours of a job since its last start and, by the accounting, how busy its cores were."""
    node_seconds = job.seconds * int(job.nodes)
    gpu_seconds = job.seconds * int(job.allocated.get("gres/gpu", "0"))
    core_seconds = job.seconds * int(job.allocated.get("cpu", "0"))
    busy = None if job.cpu_seconds is None or not core_seconds else job.cpu_seconds / core_seconds
    return f"used: {job_file.hours(node_seconds, gpu_seconds, core_seconds, busy)}"


def _find_error(job: Job) -> str:
    """The error that ended a job, from the log of its cell if it is a task of an array, else its own; "" for none."""
    if job.in_queue or job.state == "COMPLETED":
        return ""
    if job.array and job.folder and (error := find_last_error(Path(f"{job.folder}.log"))):
        return error
    return find_last_error(job.log) if job.log else ""


def _format_end(error: str, log: Path) -> Iterator[str]:
    """Lines with the error that a job ended with, if any, and its log."""
    if error:
        yield f"  ended with: {error}"
    yield f"  log: {log}"


def _format_memory_advice(job: Job, error: str) -> Iterator[str]:
    """What to do about a job that ran out of memory."""
    if job.state != "OUT_OF_MEMORY" and not is_out_of_memory(error):
        return
    limit = f"the job had {job.allocated['mem']} on {_format_nodes(job)}" if "mem" in job.allocated else "see its --mem"
    planned = "plan counts what it needs"
    if job.planned_memory:
        planned = f"plan counted {format_bytes(job.planned_memory)} for a node"
    yield f"OUT_OF_MEMORY: {limit}; {planned}: submit the same again with more --mem, or on more nodes"


def _describe_array(jobs: Sequence[Job]) -> Iterator[str]:
    """A headline, and a line for each run of each task; tasks that wait together share a line."""
    counts: dict[str, int] = {}
    for job in {job.id: job for job in jobs}.values():
        counts[job.state] = counts.get(job.state, 0) + len(job.tasks)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    yield f"job {jobs[0].array}, an array: {states}" if jobs[0].array else format_headline(jobs[0])
    for job in jobs:
        what = f"{job.state} ({job.reason})" if job.reason else job.state
        state = read_run_status(job.folder) if job.folder else None
        run = f"  {job.folder}  {summarize_progress(state, job)}" if state else ""
        error = "" if state and state.done else _find_error(job)
        why = "".join(f"; {line}" for line in _format_memory_advice(job, error))
        if error and not why:
            why = f"; ended with: {error}"
        elif job.never_starts:
            why = f"; {job.never_starts}"
        log = f"  log: {job.log}" if job.log is not None and not job.waiting and job.state != "COMPLETED" else ""
        yield f"  {job.id}  {what}{run}{why}{log}"


def describe_as_json(target: Path | str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """Jobs and runs for JSON: of a folder, of a job, or of all this user's jobs; raises as the functions for lines."""
    if isinstance(target, Path):
        jobs, note = find_jobs_of(target, environ)
        runs = find_planned_runs(target.resolve()) or [target]
        state = read_run_status(target)
        if state is not None and state.problem:
            raise CheckpointError(state.problem)
        if runs == [target] and state is None and not jobs and not find_last_errors(target):
            if not slurm.is_scaling_experiment(target):
                raise no_run_error(target)
            runs = []
    elif target is not None:
        jobs, note = find_named_jobs(target, environ), ""
        if not jobs[0].state:  # Slurm has forgotten it
            return describe_as_json(jobs[0].folder, environ)
        runs = _runs_of(jobs)
    else:
        queue = slurm.query_queue(environ)
        jobs, note = assign_folders(queue, find_job_folders(queue)), ""
        runs = _runs_of(jobs)
    newest = drop_superseded(jobs)
    return {
        "jobs": [_job_object(job) for job in newest],
        "runs": [_run_object(run, newest) for run in dict.fromkeys(runs)],
        "notes": [note] if note else [],
    }


def _runs_of(jobs: Sequence[Job]) -> list[Path]:
    """The folders of the jobs' runs, without those of sweeps: a waiting array has only the folder of its sweep."""
    return [job.folder for job in jobs if job.folder is not None and not find_planned_runs(job.folder)]


def _job_object(job: Job) -> dict[str, Any]:
    is_killed = job.state != "COMPLETED" and job.exit_code == 0  # Slurm then tells the signal instead
    return {
        "job": job.id,
        "state": job.state,
        "reason": job.reason or None,
        "nodes": int(job.nodes) if job.nodes.isdecimal() else None,
        "node_list": job.node_list or None,
        "restarts": job.restarts,
        "exit_code": None if job.in_queue or is_killed else job.exit_code,
        "seconds": job.seconds,
        "time_limit_seconds": job.limit,
        "start": job.start or None,
        "run": job.folder,
        "log": job.log,
        "error": _find_error(job) or None,
    }


def _run_object(run: Path, jobs: Sequence[Job]) -> dict[str, Any]:
    state, writer = read_run_status(run) or RunStatus(), run_lock.find_owner(run)
    running = writer is not None or any(job.active and job.folder == run.resolve() for job in jobs)
    error, log = ("", None) if state.done or running else _first_error(run)
    best, best_round = state.best or (None, None)
    is_accuracy = state.measure == ACCURACY
    return {
        "run": run,
        "title": state.title or None,
        "done": state.done,
        "running": running,
        "round": state.round,
        "rounds": state.rounds or None,
        "measure": state.measure.column,
        "last": state.last,
        "best": best,
        "best_round": best_round,
        "unseen": state.unseen,
        "accuracy_mean": state.last if is_accuracy else None,
        "best_accuracy": best if is_accuracy else None,
        "unseen_accuracy_mean": state.unseen if is_accuracy else None,
        "checkpoint": state.checkpoint,
        "seconds_per_round": state.per_round,
        "seconds_since_round": state.age,
        "seconds_left": state.to_end,
        "ranks": state.ranks,
        "stopped_early": state.early or None,
        "written_by": writer,
        "notes": state.notes,
        "problem": state.problem or None,
        "error": error or None,
        "log": log,
    }


def _first_error(run: Path) -> tuple[str, Path | None]:
    """The error that ended the process or the job of a run ("" if there is none), and its log (None if unknown)."""
    log = Path(f"{run}.log")
    if error := find_last_error(log):
        return error, log
    return next(iter(find_last_errors(run)), ("", None))
