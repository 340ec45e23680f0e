"""Slurm jobs, read from what `scontrol show job` prints, and the folders that they work in.

A job of ours carries the folder of its run (for an array, the folder of its sweep) in its comment, the only field that
is both free for us and shown without accounting.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
_OURS = "pflmpi:"
_ENDS_LINE = ("JobName", "Command", "WorkDir", "Comment", "StdOut", "StdErr", "StdIn", "AdminComment")  # free text


@dataclass(frozen=True)
class Job:
    """A job, a task of an array, or the tasks of an array that still wait together.

    Attributes:
        id: `12`; for an array's tasks `12_3`, or `12_[2-5%2]`.
        array: id of the array; "" for other jobs.
        task: number of the task; None for other jobs and for tasks that wait together.
        state: Slurm's word, such as RUNNING.
        reason: why it waits or failed; "" if Slurm gives none.
        comment: of the job; "" without one.
        nodes: their number, as Slurm writes it (`2`, `1-4`, `2K`); as requested while it waits.
        node_list: such as `node[1-2]`; "" while it waits.
        restarts: how often it was requeued.
        exit_code: of the batch script; 0 before it ends.
        seconds: since the start; 0 while it waits, even if it has run before.
        limit: time limit in seconds; None without one.
        start: when it started, or is expected to, as Slurm writes it; "" if unknown.
        log: file with the output; None without a batch script.
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

    @property
    def waiting(self) -> bool:
        """Whether it waits to start."""
        return self.state in _WAITING

    @property
    def active(self) -> bool:
        """Whether it has started and not ended."""
        return self.state in _ACTIVE

    @property
    def folder(self) -> Path | None:
        """Folder of its run, or of an array's sweep; None if its comment is not one of ours."""
        return folder_of(self.comment)

    @property
    def tasks(self) -> list[int]:
        """Numbers of the array's tasks that this is; several wait together."""
        return parse_tasks(self.id.partition("_")[2].strip("[]")) if self.array else []


def comment_of(folder: Path) -> str:
    """Comment of the job that works in the folder of a run or, for an array, of a sweep.

    >>> comment_of(Path("/scratch/me/runs/first"))
    'pflmpi:/scratch/me/runs/first'
    """
    return f"{_OURS}{folder.resolve()}"


def folder_of(comment: str) -> Path | None:
    """Folder in a job's comment; None if it is not one of ours.

    >>> folder_of("pflmpi:/scratch/me/runs/first"), folder_of("night shift")
    (PosixPath('/scratch/me/runs/first'), None)
    """
    folder = comment.removeprefix(_OURS)
    return Path(folder) if comment.startswith(_OURS) and folder.startswith("/") else None


def cells_file(sweep: Path, array: str) -> Path:
    """File that lists what an array runs: one line per task, from 0, with its run's folder relative to the sweep's.

    `submit` writes it, because nothing that Slurm shows of a task says which cell of a table it runs.
    """
    return sweep / f"array_{array}.txt"


def parse_jobs(text: str) -> list[Job]:
    """Jobs that `scontrol show job` describes, an array's tasks in order, the waiting ones last."""
    found = [_job(_fields(block)) for block in re.split(r"\n\s*\n", text) if "JobId=" in block]
    return sorted(found, key=lambda job: (job.task is None, job.task or 0))


def parse_tasks(text: str) -> list[int]:
    """Numbers in Slurm's list of an array's tasks.

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
    """Seconds in Slurm's [DAYS-]HOURS:MINUTES:SECONDS; None for UNLIMITED and the like.

    >>> duration("1-02:00:30"), duration("05:00"), duration("UNLIMITED")
    (93630.0, 300.0, None)
    """
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _fields(block: str) -> dict[str, str]:
    """Values in a block of `Key=value` lines; free text, which may look the same, extends to the end of its line."""
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
    log = fields.get("StdOut", "")
    return Job(
        id=f"{array}_{tasks if single else f'[{tasks}]'}" if array else fields["JobId"],
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
        log=Path(log) if log and (single or not array) else None,  # waiting tasks have no number for their log yet
    )
