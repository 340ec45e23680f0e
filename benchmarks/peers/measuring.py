"""One run of one simulator: when its rounds ended, and how much memory its processes needed."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_INTERVAL = 0.2  # seconds between two looks at the memory


@dataclass(frozen=True)
class Measured:
    """What was seen of a run.

    Attributes:
        first: seconds from the start of the command to the end of the first round.
        rounds: seconds of each of the others.
        memory: most bytes of all its processes together, shared pages counted once.
    """

    first: float
    rounds: list[float]
    memory: int


def run(words: list[str], folder: Path, threads: int, log: Path, limit: float) -> Measured:
    """Start a simulator and wait for its line of JSON; whatever it leaves behind is killed.

    Raises:
        RuntimeError: it failed, or took longer than `limit` seconds.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    began = time.time()
    with log.open("w") as errors:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        most, seen = [0], {process.pid}
        threading.Thread(target=_watch, args=(process, most, seen), daemon=True).start()
        timer = threading.Timer(limit, _kill, (process.pid, seen))
        timer.start()
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith('{"ends"')), None)
        timer.cancel()
        _kill(process.pid, seen)
        process.wait()
    if line is None:
        raise RuntimeError(f"{' '.join(words)} did not finish; see {log}")
    ends = json.loads(line)["ends"]
    return Measured(ends[0] - began, [end - start for start, end in itertools.pairwise(ends)], most[0])


def _watch(process: "subprocess.Popen[str]", most: list[int], seen: set[int]) -> None:
    while process.poll() is None:
        family = [*_family(process.pid)]
        seen.update(family)
        most[0] = max(most[0], sum(map(_memory, family)))
        time.sleep(_INTERVAL)


def _family(process: int) -> Iterator[int]:
    """A process and all that it and its children have started."""
    yield process
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            for child in children.read_text().split():
                yield from _family(int(child))


def _memory(process: int) -> int:
    """Proportional set size in bytes; 0 of a process that has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return 0


def _kill(process: int, seen: set[int]) -> None:
    """End a run with all that it has started: what is there, and what was `seen` and has outlived its parent."""
    family = seen | {*_family(process)}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    for one in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
