"""A process of this host: when it was started, and whether it has ended."""

import os
from pathlib import Path

_UNKNOWN = -1  # start of a process where the system does not tell
_ENDED = ("Z", "X")  # states of a process that has ended and has not been reaped


def start_of(process: int) -> int:
    """Start of a process of this host in clock ticks after the boot; 0 once it has ended, -1 where that is unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _UNKNOWN
    return 0 if fields[0] in _ENDED else int(fields[19])


def has_ended(process: int, started: int | None = None) -> bool:
    """Whether a process of this host has ended: none has its number, or one that `started` at another time."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # of another user
    now = start_of(process)
    return now == 0 if started is None else now not in (started, _UNKNOWN)
