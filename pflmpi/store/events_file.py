"""RUN/events.jsonl: the events of a run, one JSON object per line, appended by rank 0 (`output.events`)."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pflmpi import regular_file

Event = Mapping[str, Any]


def path(run: Path) -> Path:
    return run / "events.jsonl"


def append(run: Path, events: Sequence[Event]) -> None:
    """Add events in one write; raises `OSError`."""
    content = "".join(f"{json.dumps(event)}\n" for event in events).encode()
    descriptor = os.open(path(run), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "ab", buffering=0) as file:
        file.write(content)


def drop_torn_line(run: Path) -> bool:
    """Cut off an incomplete last line, left by a killed process; returns whether there are complete ones."""
    if not os.path.lexists(path(run)):
        return False
    content = regular_file.read(path(run))
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path(run), whole)
    return whole > 0


def exit_code(run: Path) -> int | None:
    """Reads the exit code of a run whose last event is its end; None where it is unknown."""
    try:
        last = json.loads(regular_file.read(path(run)).splitlines()[-1])
        return int(last["exit_code"]) if last["event"] == "end" else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
