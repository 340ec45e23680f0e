"""What Slurm's queue says about jobs: squeue names them, scontrol describes them; no accounting is needed.

A job of ours carries the folder of its run (of an array, the folder of its sweep) in its comment, because nothing else
of a job is both free for us and shown without accounting.
"""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi.errors import ConfigError, PflmpiError

TIME_LIMIT = 20.0  # seconds for an answer; a busy controller needs some, one that is down never answers
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
GOING_ON = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")

_OURS = "pflmpi:"
_ENDS_LINE = ("JobName", "Command", "WorkDir", "Comment", "StdOut", "StdErr", "StdIn", "AdminComment")  # free text
_BETWEEN = "\x1f"  # fields of squeue: no path has it
_FIELDS = ("%F", "%j", "%k")  # job or array, name, comment
_UNKNOWN = re.compile(r"invalid job id|job \S+ not found", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """A job, or a task of an array, or the tasks of an array that still wait together.

    Attributes:
        id: `12`; of an array's tasks `12_3`, or `12_[2-5%2]`.
        array: the id of the array, "" for other jobs.
        task: the task's number; None for other jobs and for tasks that wait together.
        state: Slurm's word, such as RUNNING.
        reason: why it waits or has failed; "" where Slurm gives none.
        comment: the job's comment, "" without one.
        nodes: their number, as Slurm writes it (`2`, `1-4`, `2K`); while it waits, how many it asks for.
        node_list: such as `node[1-2]`; "" while it waits.
        restarts: how often it was requeued.
        exit_code: of the batch script; 0 before it ends.
        seconds: since the start; 0 while it waits, also if it has run before.
        limit: of seconds; None without one.
        start: when it started, or is expected to, as Slurm writes it; "" if that is unknown.
        log: where the output goes; None if there is no batch script.
    """

    id: str
    array: str
    task: int | None
    state: str
    reason: str
    comment: str
    nodes: str
    node_list: str
    restarts: int
    exit_code: int
    seconds: float
    limit: float | None
    start: str
    log: Path | None


def comment_of(run: Path) -> str:
    """Return the comment of the job that makes this run; of an array, with the folder of its sweep.

    >>> comment_of(Path("/scratch/me/runs/first"))
    'pflmpi:/scratch/me/runs/first'
    """
    return f"{_OURS}{run.resolve()}"


def run_of(comment: str) -> Path | None:
    """Return the folder in a job's comment; None if it is no comment of ours.

    >>> run_of("pflmpi:/scratch/me/runs/first"), run_of("night shift")
    (PosixPath('/scratch/me/runs/first'), None)
    """
    folder = comment.removeprefix(_OURS)
    return Path(folder) if comment.startswith(_OURS) and folder.startswith("/") else None


def cells_file(sweep: Path, array: str) -> Path:
    """Return the file that lists what an array runs: a line per task, from 0, the folder of its run below the sweep's.

    `submit` writes it, because nothing that Slurm shows of a task says which cell of a table it runs.
    """
    return sweep / f"array_{array}.txt"


def mine(environ: Mapping[str, str], run: Path | None = None) -> list[Job]:
    """Return this user's jobs with a comment of ours or a name that begins with `pflmpi`, those that ended of late too.

    Args:
        environ: the environment of this process, for the commands of Slurm.
        run: only jobs that make this run, or a sweep that it may be part of.

    Raises:
        ConfigError: there is no Slurm here.
        PflmpiError: Slurm does not answer; so for `jobs`.
    """
    fields = _BETWEEN.join(_FIELDS)
    text = _ask(["squeue", f"--user={os.getuid()}", "--states=all", "--noheader", "--format", fields], environ)
    found = parse_list(text)
    if run is not None:
        about = (run.resolve(), *run.resolve().parents)
        found = {name: folder for name, folder in found.items() if folder in about}
    return [job for name in found for job in jobs(name, environ)]


def jobs(name: str, environ: Mapping[str, str]) -> list[Job]:
    """Return a job, a task of an array (`12_3`), or all tasks of an array; none if Slurm does not know it any more."""
    try:
        return parse_jobs(_ask(["scontrol", "show", "job", name], environ))
    except _Refused as refused:
        if _UNKNOWN.search(str(refused)):
            return []
        raise


def parse_list(text: str) -> dict[str, Path | None]:
    """Return the jobs and arrays of ours in squeue's list of `_FIELDS`: from id to the folder in the comment."""
    lines = [line.split(_BETWEEN) for line in text.splitlines()]
    whole = [line for line in lines if len(line) == len(_FIELDS)]  # among several clusters, each has a headline
    folders = {name: (title, run_of(comment.strip())) for name, title, comment in whole}
    ours = {name: folder for name, (title, folder) in folders.items() if folder or title.startswith("pflmpi")}
    return dict(sorted(ours.items(), key=lambda item: int(item[0])))  # squeue's own order is that of priority


def parse_jobs(text: str) -> list[Job]:
    """Return the jobs that `scontrol show job` describes, an array's tasks in their order, the waiting ones last."""
    found = [_job(_fields(block)) for block in re.split(r"\n\s*\n", text) if "JobId=" in block]
    return sorted(found, key=lambda job: (job.task is None, job.task or 0))


def tasks_of(job: Job) -> list[int]:
    """Return the numbers of the tasks of an array that this is; several wait together."""
    return parse_tasks(job.id.partition("_")[2].strip("[]")) if job.array else []


def parse_tasks(text: str) -> list[int]:
    """Return the numbers in Slurm's list of an array's tasks.

    >>> parse_tasks("0,4-6,10-20:5%2")
    [0, 4, 5, 6, 10, 15, 20]
    """
    result: list[int] = []
    for part in text.partition("%")[0].split(","):
        if found := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip()):
            first, last, step = found.groups()
            result += range(int(first), int(last or first) + 1, int(step or 1))
    return result


def duration(text: str) -> float | None:
    """Return the seconds of Slurm's [DAYS-]HOURS:MINUTES:SECONDS; None for UNLIMITED and the like.

    >>> duration("1-02:00:30"), duration("05:00"), duration("UNLIMITED")
    (93630.0, 300.0, None)
    """
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _fields(block: str) -> dict[str, str]:
    """Return what a block of `Key=value` lines says; free text, which may look the same, goes to the line's end."""
    result: dict[str, str] = {}
    for line in block.splitlines():
        rest = line.strip()
        while rest:
            key, _, value = rest.partition("=")
            parts = [value] if key in _ENDS_LINE else re.split(r" (?=[A-Z][\w/:]*=)", value, maxsplit=1)
            result.setdefault(key, parts[0].strip())
            rest = parts[1] if len(parts) > 1 else ""
    return {key: value for key, value in result.items() if value not in ("(null)", "N/A", "Unknown", "None")}


def _job(fields: Mapping[str, str]) -> Job:
    array, tasks = fields.get("ArrayJobId", ""), fields.get("ArrayTaskId", "")
    single = tasks.isdecimal()
    name = f"{array}_{tasks if single else f'[{tasks}]'}" if array else fields["JobId"]
    log = fields.get("StdOut", "")
    return Job(
        id=name,
        array=array,
        task=int(tasks) if single else None,
        state=fields.get("JobState", "UNKNOWN"),
        reason=fields.get("Reason", ""),
        comment=fields.get("Comment", ""),
        nodes="-".join(dict.fromkeys(fields.get("NumNodes", "1").split("-"))),  # 2-2 is 2
        node_list=fields.get("NodeList", ""),
        restarts=int(fields.get("Restarts", 0)),
        exit_code=int(fields.get("ExitCode", "0").partition(":")[0]),
        seconds=duration(fields.get("RunTime", "")) or 0.0,
        limit=duration(fields.get("TimeLimit", "")),
        start=fields.get("StartTime", ""),
        log=Path(log) if log and (single or not array) else None,  # one that waits has no number for its log yet
    )


class _Refused(PflmpiError):
    """A command of Slurm has ended with an error."""


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what a command of Slurm prints."""
    clean = {key: value for key, value in environ.items() if not key.startswith("SQUEUE_")}  # they filter and sort
    clean["SLURM_BITSTR_LEN"] = "0"  # all tasks of an array that wait together, however many
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
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
        os.killpg(process.pid, signal.SIGKILL)  # a site's wrapper around it too
        process.communicate()
        raise PflmpiError(
            f"{command[0]} did not answer within {TIME_LIMIT:.0f} s: Slurm's controller is busy or down; "
            "try again later, or name the folder of a run: pflmpi status RUN"
        ) from error
    if process.returncode:
        why = " ".join((err or out).split()) or f"exit code {process.returncode}"
        raise _Refused(f"{command[0]} failed: {why}; try again later, or name the folder of a run: pflmpi status RUN")
    return out
