"""Asking Slurm: squeue lists this user's jobs, scontrol describes them; no accounting is needed."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pflmpi.cluster.jobs import Job, folder_of, parse_jobs
from pflmpi.errors import ConfigError, PflmpiError

TIME_LIMIT = 20.0  # seconds for an answer; a busy controller needs some, one that is down never answers

_FIELDS = ("%F", "%j", "%k")  # of squeue: job or array, name, comment
_SEPARATOR = "\x1f"  # between the fields: no path contains it
_UNKNOWN = re.compile(r"invalid job id|job \S+ not found", re.IGNORECASE)


def mine(environ: Mapping[str, str], run: Path | None = None) -> list[Job]:
    """This user's jobs with a comment of ours or a name that begins with `pflmpi`, recently ended ones included.

    Args:
        environ: the environment of this process, for the commands of Slurm.
        run: only jobs of this run, or of a sweep that it may be part of.

    Raises:
        ConfigError: there is no Slurm here.
        NoAnswer: Slurm does not answer; the same holds for `jobs`.
    """
    fields = _SEPARATOR.join(_FIELDS)
    text = _ask(["squeue", f"--user={os.getuid()}", "--states=all", "--noheader", "--format", fields], environ)
    found = parse_list(text)
    if run is not None:
        about = (run.resolve(), *run.resolve().parents)
        found = {name: folder for name, folder in found.items() if folder in about}
    return [job for name in found for job in jobs(name, environ)]


def jobs(name: str, environ: Mapping[str, str]) -> list[Job]:
    """A job, a task of an array (`12_3`), or all tasks of an array; none if Slurm no longer knows it."""
    try:
        return parse_jobs(_ask(["scontrol", "show", "job", name], environ))
    except _Refused as refused:
        if _UNKNOWN.search(str(refused)):
            return []
        raise


def parse_list(text: str) -> dict[str, Path | None]:
    """Jobs and arrays of ours in squeue's list of `_FIELDS`: from id to the folder in the comment."""
    lines = [line.split(_SEPARATOR) for line in text.splitlines()]
    whole = [line for line in lines if len(line) == len(_FIELDS)]  # with several clusters, each has a headline
    folders = {name: (title, folder_of(comment.strip())) for name, title, comment in whole}
    ours = {name: folder for name, (title, folder) in folders.items() if folder or title.startswith("pflmpi")}
    return dict(sorted(ours.items(), key=lambda item: int(item[0])))  # squeue sorts by priority


class NoAnswer(PflmpiError):
    """Slurm does not answer.

    Attributes:
        why: in words, without what to do about it.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; try again later, or name the folder of a run: pflmpi status RUN")
        self.why = why


class _Refused(NoAnswer):
    """A command of Slurm failed."""


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Output of a command of Slurm."""
    clean = {key: value for key, value in environ.items() if not key.startswith("SQUEUE_")}  # they filter and sort
    clean["SLURM_BITSTR_LEN"] = "0"  # list all tasks of an array that wait together, however many
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
        os.killpg(process.pid, signal.SIGKILL)  # including a site's wrapper around it
        process.communicate()
        raise NoAnswer(
            f"{command[0]} did not answer within {TIME_LIMIT:.0f} s: Slurm's controller is busy or down"
        ) from error
    if process.returncode:
        why = " ".join((err or out).split()) or f"exit code {process.returncode}"
        raise _Refused(f"{command[0]} failed: {why}")
    return out
