"""Slurm jobs: `squeue` once for all of this user's jobs, `sacct` for older ones, and the folders that they work in."""

import glob
import os
import re
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pflmpi.cluster.batch_script import parse_time
from pflmpi.cluster.job_log import expand_pattern, find_last_error
from pflmpi.errors import ConfigError, PflmpiError
from pflmpi.store import job_file
from pflmpi.store.job_file import Submission
from pflmpi.store.runs import find_runs, is_run
from pflmpi.transports.slurm import without_formats

_LONGEST_PAUSE = 16.0  # seconds between two queries while waiting for a job
TIME_LIMIT = 20.0  # seconds for an answer: a busy controller is slow, one that is down never answers

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
_UNKNOWN = ("", "(null)", "N/A", "n/a", "Unknown", "None", "NULL")
# squeue's fields with their widths in bytes: a separator could occur in a path.
_QUEUE = {
    "JobArrayID": 4096,  # with all tasks of an array that wait together
    "JobID": 32,
    "State": 32,
    "Reason": 128,
    "NumNodes": 32,
    "NodeList": 1024,
    "RestartCnt": 16,
    "exit_code": 16,
    "TimeUsed": 32,
    "TimeLimit": 32,
    "StartTime": 32,
    "tres-alloc": 512,
    "Name": 256,
    "WorkDir": 1024,
    "STDOUT": 1024,
}
_ACCOUNTED = "JobID,JobIDRaw,State,NNodes,NodeList,ExitCode,Elapsed,Timelimit,Start,AllocTRES,TotalCPU,WorkDir"


@dataclass(frozen=True)
class Job:
    """A job, a task of an array, or the tasks of an array that still wait together.

    Attributes:
        id: `12`; for an array's tasks `12_3`, or `12_[2-5%2]`.
        number: of the job alone, also for a task of an array.
        state: in Slurm's words, such as RUNNING.
        reason: why it waits or failed; "" if Slurm gives none.
        nodes: number of nodes; while it waits, the number requested.
        node_list: such as `node[1-2]`; "" while it waits.
        restarts: how often it was requeued.
        exit_code: of the batch script; 0 before it ends.
        seconds: since the start; 0 while it waits, even if it has run before.
        limit: time limit in seconds; None if unlimited.
        start: when it started or is expected to start, as Slurm writes it; "" if unknown.
        directory: where it was submitted; "" if unknown.
        allocated: resources on all nodes together, such as {"cpu": "4", "mem": "8000M", "gres/gpu": "2"}.
        cpu_seconds: processor time of its processes; None without accounting.
        log: file with the output; None if unknown, or for tasks that wait together.
        requeues: whether it is requeued before its time limit, as `submit` recorded.
        planned_memory: bytes that `plan` counted for a node when it was submitted; 0 if it was not asked.
        folder: the folder of its run, or of its sweep for a task whose run is unknown; None if unknown.
    """

    id: str
    number: str
    state: str
    reason: str = ""
    nodes: str = "1"
    node_list: str = ""
    restarts: int = 0
    exit_code: int = 0
    seconds: float = 0.0
    limit: float | None = None
    start: str = ""
    directory: str = ""
    allocated: Mapping[str, str] = field(default_factory=dict)
    cpu_seconds: float | None = None
    log: Path | None = None
    requeues: bool = False
    planned_memory: int = 0
    folder: Path | None = None

    @property
    def waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def active(self) -> bool:
        return self.state in _ACTIVE

    @property
    def in_queue(self) -> bool:
        return self.waiting or self.active

    @property
    def may_run(self) -> bool:
        """Whether it runs, or may start yet."""
        return self.in_queue and not self.never_starts

    @property
    def never_starts(self) -> str:
        """Why a job that Slurm keeps in its queue will never start, and what to do; "" for other jobs."""
        if not self.waiting or self.reason != "DependencyNeverSatisfied":
            return ""
        name = self.array if len(self.tasks) > 1 else self.id
        return f"will never start: its --dependency can no longer be met; end it (scancel {name}) and submit again"

    @property
    def array(self) -> str:
        """Id of its array; "" for other jobs."""
        array, tasks, _ = self.id.partition("_")
        return array if tasks else ""

    @property
    def tasks(self) -> list[int]:
        """Numbers of its tasks of the array; several only while they wait together."""
        return parse_tasks(self.id.partition("_")[2].strip("[]"))


class NoAnswer(PflmpiError):
    """Slurm does not answer.

    Attributes:
        why: the reason, without the remedy that the message adds.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; try again later, or name the folder of a run: pflmpi status RUN")
        self.why = why


def query_queue(environ: Mapping[str, str]) -> list[Job]:
    """This user's jobs in Slurm's memory, sorted by number; tasks of an array in order, the waiting ones last.

    Raises:
        ConfigError: there is no Slurm here.
        NoAnswer: Slurm does not answer.
    """
    fields = ",".join(f"{name}:{width}" for name, width in _QUEUE.items())
    return parse_queue(
        run_command(["squeue", f"--user={os.getuid()}", "--states=all", "--noheader", "-O", fields], environ)
    )


def query_accounting(id: str, environ: Mapping[str, str]) -> list[Job]:
    """A job, or the tasks of an array, as the accounting has them; empty without accounting."""
    # Not with --allocations: without the steps of a job sacct gives no processor time.
    words = ["sacct", "--noheader", "--parsable2", f"--jobs={id}", f"--format={_ACCOUNTED}"]
    try:
        return parse_accounted(run_command(words, environ))
    except (ConfigError, NoAnswer):
        return []


def find(name: str, environ: Mapping[str, str]) -> list[Job]:
    """Jobs with the id of a job, a task or an array, from the queue and the accounting; raises as `query_queue`."""
    return _select(name, add_forgotten(name, query_queue(environ), environ))


def _select(name: str, jobs: Sequence[Job]) -> list[Job]:
    """Those of the jobs with the id of a job, a task or an array."""
    array, _, task = name.partition("_")

    def is_named(job: Job) -> bool:
        contains_task = job.array == array and task.isdecimal() and int(task) in job.tasks
        return contains_task or name in (job.id, job.array, job.number)

    return list(filter(is_named, jobs))


def add_forgotten(
    name: str, queue: Sequence[Job], environ: Mapping[str, str], expected: Collection[int] = ()
) -> list[Job]:
    """The queue, and what it lacks of an id, by the accounting: a job, or tasks of an array that ended first.

    Args:
        expected: the tasks of an array, if they are known; where the queue has all, the accounting is not asked.
    """
    queued = _select(name, queue)
    if any(job.array != name for job in queued):  # not an array: it is there as a whole
        return list(queue)
    tasks = {task for job in queued for task in job.tasks}
    if expected and tasks.issuperset(expected):
        return list(queue)
    accounted = _select(name, query_accounting(name, environ))
    return sorted([*queue, *(job for job in accounted if tasks.isdisjoint(job.tasks))], key=_sort_key)


def wait(name: str, environ: Mapping[str, str]) -> list[Job]:
    """Wait until no job with an id runs or may start yet; return the jobs, none if Slurm has forgotten them."""
    pause = 0.5
    while True:
        with suppress(NoAnswer):  # the controller is busy
            queue = query_queue(environ)
            jobs = _select(name, queue)
            if not any(job.may_run for job in jobs):
                jobs = _select(name, add_forgotten(name, queue, environ))
            if not any(job.may_run for job in jobs):
                return jobs
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def cancel(ids: Sequence[str], environ: Mapping[str, str]) -> None:
    run_command(["scancel", *ids], environ)


def parse_queue(text: bytes) -> list[Job]:
    """Jobs in the output of `squeue` with the fields of `_QUEUE`."""
    jobs = []
    for line in text.splitlines():
        if len(line) < sum(_QUEUE.values()):  # a heading, where there are several clusters
            continue
        fields: dict[str, str] = {}
        for name, width in _QUEUE.items():
            fields[name], line = line[:width].decode(errors="replace").strip(), line[width:]
        values = {name: "" if value in _UNKNOWN else value for name, value in fields.items()}
        jobs.append(
            Job(
                id=values["JobArrayID"],
                number=values["JobID"],
                state=values["State"],
                reason=values["Reason"],
                nodes=values["NumNodes"] or "1",
                node_list=values["NodeList"],
                restarts=int(values["RestartCnt"] or 0),
                exit_code=int(values["exit_code"] or 0) >> 8,  # a wait status
                seconds=parse_time(values["TimeUsed"]) or 0,
                limit=parse_time(values["TimeLimit"]),
                start=values["StartTime"],
                allocated=_parse_resources(values["tres-alloc"]),
                directory=values["WorkDir"],
                log=_log(values),
            )
        )
    return sorted(jobs, key=_sort_key)


def _log(values: Mapping[str, str]) -> Path | None:
    """The log of a job; squeue may show it as the pattern given to sbatch."""
    if not values["STDOUT"] or "[" in values["JobArrayID"]:
        return None
    letters = {**_pattern_values(values["JobArrayID"], values["JobID"]), "x": values["Name"]}
    return Path(expand_pattern(values["STDOUT"], letters))


def _pattern_values(id: str, number: str) -> dict[str, str]:
    """Values of the letters in a file name pattern that depend on the job."""
    array, _, task = id.partition("_")
    return {"j": number, "A": array, "a": task}


def _parse_resources(text: str) -> dict[str, str]:
    """Amount of each resource in Slurm's list, such as `cpu=2,mem=150M`."""
    return {name: value for name, _, value in (item.rpartition("=") for item in text.split(",")) if name}


def parse_accounted(text: bytes) -> list[Job]:
    """Jobs in the output of `sacct` with the fields of `_ACCOUNTED`; their steps are left out."""
    names = _ACCOUNTED.split(",")
    jobs = []
    for line in text.decode(errors="replace").splitlines():
        fields = ["" if field in _UNKNOWN else field for field in line.split("|", len(names) - 1)]
        if len(fields) < len(names) or "." in fields[0]:  # 12.batch is a step
            continue
        values = dict(zip(names, fields, strict=True))
        jobs.append(
            Job(
                id=values["JobID"],
                number=values["JobIDRaw"],
                state=values["State"].split()[0],  # CANCELLED by 1000
                nodes=values["NNodes"],
                node_list=values["NodeList"].replace("None assigned", ""),
                exit_code=int(values["ExitCode"].partition(":")[0] or 0),
                seconds=parse_time(values["Elapsed"]) or 0,
                limit=parse_time(values["Timelimit"]),
                start=values["Start"],
                allocated=_parse_resources(values["AllocTRES"]),
                cpu_seconds=parse_time(values["TotalCPU"].partition(".")[0]),
                directory=values["WorkDir"],
            )
        )
    return sorted(jobs, key=_sort_key)


def parse_tasks(text: str) -> list[int]:
    """Numbers in Slurm's list of an array's tasks.

    >>> parse_tasks("0,4-6,10-20:5%2")
    [0, 4, 5, 6, 10, 15, 20]
    """
    result: list[int] = []
    for part in text.partition("%")[0].split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip()):
            first, last, step = match.groups()
            result += range(int(first), int(last or first) + 1, int(step or 1))
    return result


def _sort_key(job: Job) -> tuple[int, bool, int]:
    """Sort key: by number, tasks that wait together after the other tasks of their array."""
    number = job.array or job.number
    return int(number) if number.isdecimal() else 0, "[" in job.id, (job.tasks or [0])[0]


def run_command(command: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Output of a command of Slurm.

    Raises:
        ConfigError: there is no such command here.
        NoAnswer: it fails, or does not answer in time.
    """
    # All tasks of an array that wait together are listed, however many.
    clean = {**without_formats(environ), "SLURM_BITSTR_LEN": "0"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(
            f"{command[0]} cannot be started ({error.strerror}): there is no Slurm here; "
            "name the folder of a run: pflmpi status RUN"
        ) from error
    try:
        out, err = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)  # including a site's wrapper around it
        process.communicate()
        raise NoAnswer(
            f"{command[0]} did not answer within {TIME_LIMIT:.0f} s: Slurm's controller is busy or down"
        ) from error
    if process.returncode:
        why = " ".join((err or out).decode(errors="replace").split()) or f"exit code {process.returncode}"
        raise NoAnswer(f"{command[0]} failed: {why}")
    return out


_CELL = "*/*/seed*"  # a run below its sweep
# Where runs, sweeps, points of scaling experiments and cells usually are, below the folder where a job was submitted.
_USUAL = ("*", "*/*", "scaling/*/ranks-*", f"sweeps/*/{_CELL}")


def find_runs_below(sweep: Path) -> list[Path]:
    """Folders of the runs in a sweep, in a scaling experiment, or just in a folder, sorted by name; empty for a run.

    Includes the cells of a sweep that failed before their folder was made.
    """
    if is_run(sweep):  # whose folders may be a stranger's links
        return []
    return sorted({*find_runs(sweep), *(path.with_suffix("") for path in sweep.glob(f"{_CELL}.yaml"))})


def find_planned_runs(folder: Path) -> list[Path]:
    """As `find_runs_below`, with the cells for which the newest array of a sweep was submitted."""
    submissions = [*job_file.read_submissions(folder).values()]
    cells = {folder / cell for cell in (submissions[-1].cells if submissions else ())}
    return sorted({*find_runs_below(folder), *cells})


def has_task_started(sweep: Path, cell: Path) -> bool:
    """Whether the newest array task that a cell was submitted for has started, and so has a log."""
    name = str(cell.relative_to(sweep))
    submissions = [job for job in job_file.read_submissions(sweep).values() if name in job.cells]
    return any(_find_logs(job, str(job.cells[name])) for job in submissions[-1:])


def _find_logs(submission: Submission, task: str = "*") -> list[str]:
    return glob.glob(expand_pattern(glob.escape(submission.log), {"a": task, "j": "*"}))


def find_last_errors(folder: Path) -> list[tuple[str, Path]]:
    """Last error in each log of the newest job submitted for a run or a sweep ("" if there is none), and the log."""
    submitted = [*job_file.read_submissions(folder).values()]
    if not submitted:
        return []
    return [(find_last_error(log), log) for log in map(Path, sorted(_find_logs(submitted[-1])))]


def find_job_folders(jobs: Iterable[Job]) -> Iterator[Path]:
    """Folders where jobs may work: usual ones below the directories of submission, and those that logs are named by."""
    for directory in dict.fromkeys(job.directory for job in jobs if job.directory):
        for pattern in _USUAL:
            for path in sorted(Path(directory).glob(f"{pattern}/jobs.txt")):
                yield from list_job_folders(path.parent)
    for job in jobs:
        if job.log is not None and job.log.name.endswith(end := f".{job.id}.log"):
            yield from list_job_folders(job.log.with_name(job.log.name.removesuffix(end)))


def assign_folders(jobs: Iterable[Job], folders: Iterable[Path]) -> list[Job]:
    """The jobs named in the jobs.txt of one of the folders, with that folder; a job of several runs once for each.

    The jobs.txt of a run names the jobs (or tasks of an array) that started it, that of a sweep its whole array.
    """
    runs: dict[str, list[Path]] = {}
    sweeps: dict[str, list[Path]] = {}
    submissions: dict[str, Submission] = {}
    for folder in {os.path.realpath(folder): folder for folder in folders}.values():
        submissions |= job_file.read_submissions(folder)
        by_number = runs if is_run(folder) else sweeps
        for number in job_file.read_restarts(folder):
            by_number.setdefault(number, []).append(folder)
    result = []
    for job in jobs:
        submitted = job.array or job.number
        for folder in runs.get(job.number) or sweeps.get(submitted, []):
            result.append(_as_submitted(replace(job, folder=folder), submissions.get(submitted)))
    return result


def _as_submitted(job: Job, submission: Submission | None) -> Job:
    """The job with what `submit` recorded about it."""
    if submission is None:
        return job
    waits_together = len(job.tasks) > bool(job.array)  # and such tasks have no log
    log = None if waits_together else Path(expand_pattern(submission.log, _pattern_values(job.id, job.number)))
    return replace(job, log=job.log or log, requeues=submission.requeues, planned_memory=submission.memory)


def is_scaling_experiment(folder: Path) -> bool:
    return (folder / "scale.yaml").exists()


def list_job_folders(folder: Path) -> list[Path]:
    """A folder, and those in it that name jobs: the runs of a sweep, or the points of a scaling experiment."""
    cells = () if is_run(folder) else folder.glob(f"{_CELL}/jobs.txt")
    points = folder.glob("ranks-*/jobs.txt") if is_scaling_experiment(folder) else ()
    return [*(path.parent for path in [*sorted(cells), *points]), folder]


def find_jobs_in(folder: Path, jobs: Sequence[Job]) -> list[Job]:
    """Those of the jobs that work on a run, a sweep and its runs, or the points of a scaling experiment.

    Their restarts include those recorded in jobs.txt. A folder that merely holds runs has no jobs: otherwise `cancel`
    of it would end all of them.
    """
    folder = folder.resolve()
    restarts, in_folder = job_file.read_restarts(folder), assign_folders(jobs, list_job_folders(folder))
    return [replace(job, restarts=max(job.restarts, restarts.get(job.number, 0))) for job in in_folder]
