"""Processes: a few at a time, each with a log, and none left behind."""

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

_PAUSE = 0.2  # seconds between two polls
GRACE = 40.0  # seconds to end after SIGTERM: torch's launcher gives its ranks 30


@dataclass(frozen=True)
class LoggedCommand:
    """A command, and the file for its output."""

    name: str
    command: Sequence[str]
    log: Path


@dataclass(frozen=True)
class ProcessStates:
    """Names of the running commands, and exit codes of those that ended since the last poll.

    A negative code is the signal that killed the process.
    """

    running: list[str]
    ended: dict[str, int]


def run_all(
    commands: Sequence[LoggedCommand], environments: Sequence[Mapping[str, str]], *held: int
) -> Generator[ProcessStates, None, None]:
    """Run commands in order, one at a time in each environment, and poll them until all have ended.

    Closing the generator ends the running commands with all processes of their groups.

    Args:
        environments: the variables of each slot, in which one command runs at a time.
        held: descriptors that every command keeps open, so that a lock on them holds until all have ended.
    """
    waiting = deque(commands)
    running: dict[int, tuple[LoggedCommand, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or running:
            for slot, environment in enumerate(environments):
                if waiting and slot not in running:
                    command = waiting.popleft()
                    running[slot] = command, _start(command, environment, held)
            codes = {slot: process.poll() for slot, (_, process) in running.items()}
            ended = {running.pop(slot)[0].name: code for slot, code in codes.items() if code is not None}
            yield ProcessStates([command.name for command, _ in running.values()], ended)
            if not ended:
                time.sleep(_PAUSE)
    finally:
        _stop([process for _, process in running.values()])


def _start(command: LoggedCommand, environment: Mapping[str, str], held: Sequence[int]) -> "subprocess.Popen[bytes]":
    try:
        with open(command.log, "wb") as log:
            return subprocess.Popen(
                command.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=held,
                start_new_session=True,  # Ctrl-C reaches only the sweep, which then ends the whole group
            )
    except OSError as error:
        raise RunError(f"cannot start {command.name}: {error}") from error


def _stop(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    end = time.monotonic() + GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0))
        _signal(process, signal.SIGKILL)  # what is left of the group
        process.wait()


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
