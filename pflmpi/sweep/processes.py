"""Runs as processes: a few at a time, each with a log, and none left behind."""

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi.errors import RunError

_PAUSE = 0.2  # seconds between two looks
_GRACE = 40.0  # seconds to end after SIGTERM: torch's launcher gives its ranks 30


@dataclass(frozen=True)
class Job:
    """A command, and the file for all that it prints."""

    name: str
    command: Sequence[str]
    log: Path


@dataclass(frozen=True)
class Look:
    """What is going on: the jobs that run, and the exit codes of those that have ended since the last look.

    A negative code is that of the signal which has killed the process.
    """

    running: list[str]
    ended: dict[str, int]


def run_all(jobs: Sequence[Job], environments: Sequence[Mapping[str, str]], *held: int) -> Generator[Look, None, None]:
    """Run jobs in their order, one at a time in each environment, and look at them again and again.

    When the iterator is closed, the jobs that still run are ended with all processes of their groups.

    Args:
        jobs: what to run.
        environments: the variables for the jobs of each place.
        held: descriptors that every job keeps open, so that a lock on them holds until all have ended.
    """
    waiting = deque(jobs)
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or running:
            for place, environment in enumerate(environments):
                if waiting and place not in running:
                    job = waiting.popleft()
                    running[place] = job, _start(job, environment, held)
            codes = {place: process.poll() for place, (_, process) in running.items()}
            ended = {running.pop(place)[0].name: code for place, code in codes.items() if code is not None}
            yield Look([job.name for job, _ in running.values()], ended)
            if not ended:
                time.sleep(_PAUSE)
    finally:
        _stop([process for _, process in running.values()])


def _start(job: Job, environment: Mapping[str, str], held: Sequence[int]) -> "subprocess.Popen[bytes]":
    try:
        with open(job.log, "wb") as log:
            return subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=held,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then ends the whole group
            )
    except OSError as error:
        raise RunError(f"cannot start {job.name}: {error}") from error


def _stop(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    end = time.monotonic() + _GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0))
        _signal(process, signal.SIGKILL)  # what is left of the group
        process.wait()


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
