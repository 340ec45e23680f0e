"""The log of a job: its name, and the error that it ends with."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pflmpi import regular_file

_TAIL = 1 << 16  # bytes
_OUT_OF_MEMORY = re.compile(r"oom[-_ ]kill|out of memory", re.IGNORECASE)
# Errors of pflmpi, of `pflmpi sweep` for a cell, and of Slurm; not that a step or a start ended.
_ERROR = re.compile(r"(?:pflmpi|failed|(?:slurmstepd|srun)\S* error): (?!\*\*\* STEP |.* DUE TO JOB REQUEUE)(.+)")
_END_OF_RANKS = re.compile(r"\S+: tasks? \S+: (.+)")  # by Slurm, such as `node1: tasks 0-1: Terminated`


def expand_pattern(pattern: str, values: Mapping[str, str]) -> str:
    """Expand a pattern of `sbatch --output`; a letter without a value stays as it is.

    >>> expand_pattern("50%%-%j.%4a.log", {"j": "12", "a": "3"})
    '50%-12.0003.log'
    """

    def replaced(match: re.Match[str]) -> str:
        value = {"%": "%", **values}.get(match[2])
        return match[0] if value is None else value.zfill(int(match[1] or 0)) if value.isdecimal() else value

    return re.sub(r"%(\d*)([%A-Za-z])", replaced, pattern)


def find_last_error(log: Path) -> str:
    """The last error in a log, or the first about memory, because others follow from it; "" if there is none."""
    try:
        with regular_file.open_regular(log) as file:
            file.seek(max(regular_file.check(log) - _TAIL, 0))
            lines = file.read(_TAIL).decode(errors="replace").splitlines()
    except OSError:
        return ""
    errors = _drop_consequences([match[1] for line in lines if (match := _ERROR.match(line))])
    return next(filter(is_out_of_memory, errors), errors[-1] if errors else "")


def _drop_consequences(errors: Sequence[str]) -> list[str]:
    """The errors without what Slurm says of ranks that had another error, or that it ended after the first one."""
    causes, has_ended = [], False
    for error in errors:
        end = _END_OF_RANKS.match(error)
        is_cause = end is None or not (has_ended or end[1].startswith(("Terminated", "Exited with exit code")))
        if is_cause or is_out_of_memory(error):
            causes.append(error)
        has_ended = has_ended or end is not None
    return causes


def is_out_of_memory(error: str) -> bool:
    return bool(_OUT_OF_MEMORY.search(error))
