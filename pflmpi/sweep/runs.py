"""Runs the cells of a sweep: processes with a log each, a few at a time, shown while they run, stopped together."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pflmpi.cluster.job_log import find_last_error
from pflmpi.errors import RunError, Stopped
from pflmpi.store import metrics_file
from pflmpi.sweep.pending import CellTask
from pflmpi.terminal import console

_PAUSE = 0.2  # seconds between two polls
GRACE = 40.0  # seconds to end after SIGTERM: torch's launcher gives its ranks 30

Command = tuple[str, Sequence[str], Path]  # its name, its words, its log


def run_all(
    commands: Sequence[Command], environments: Sequence[Mapping[str, str]], *locks: int
) -> Generator[tuple[list[str], dict[str, int]], None, None]:
    """Runs commands in order, one at a time in each environment, and polls them until all have ended.

    Yields the names of those that run, and the exit codes of those that have ended since the last poll; a negative one
    is the signal that killed the process. Closing the generator stops the running commands with all processes of their
    groups.

    Args:
        environments: variables of each slot.
        locks: descriptors that every command inherits, so that their locks hold until all have ended.
    """
    waiting = deque(commands)
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or running:
            for slot, environment in enumerate(environments):
                if waiting and slot not in running:
                    command = waiting.popleft()
                    running[slot] = command[0], _start(command, environment, locks)
            codes = {slot: process.poll() for slot, (_, process) in running.items()}
            ended = {running.pop(slot)[0]: code for slot, code in codes.items() if code is not None}
            yield [name for name, _ in running.values()], ended
            if not ended:
                time.sleep(_PAUSE)
    finally:
        _stop([process for _, process in running.values()])


def _start(command: Command, environment: Mapping[str, str], locks: Sequence[int]) -> "subprocess.Popen[bytes]":
    name, words, log = command
    environment = {key: value for key, value in environment.items() if key != "PFLMPI_EXIT_FILE"}  # the sweep's
    try:
        with open(log, "wb") as output:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=locks,
                start_new_session=True,  # Ctrl-C reaches only the sweep, which then ends the whole group
            )
    except OSError as error:
        raise RunError(f"cannot start {name}: {error}") from error


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


_SPEED_WINDOW = 1800.0  # seconds over which the speed is measured: rounds of different cells differ in length


@dataclass
class SweepOutcome:
    """How the runs of a sweep ended."""

    failed: dict[str, str] = field(default_factory=dict)  # cause of failure by cell name
    stopped: list[str] = field(default_factory=list)  # names of cells whose runs have stopped and can be resumed
    signal: int = 0  # the signal that stopped the sweep, or 0

    @property
    def exit_code_of_signal(self) -> int:
        """Exit code after a signal: 130 after Ctrl-C, else that of a stopped run."""
        return 128 + self.signal if self.signal == signal.SIGINT else Stopped.exit_code


def run_cells(
    tasks: Sequence[CellTask],
    out: Path,
    launcher: Callable[[CellTask], Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    locks: Sequence[int],
    record: Callable[[CellTask], str],
    until: float | None = None,
    python: str = sys.executable,
) -> SweepOutcome:
    """Runs the cells that are not done, and shows their progress.

    Args:
        launcher: words that start a run on its ranks; none if runs start their own ranks.
        environments: variables of each slot, in which one run goes at a time.
        locks: descriptors that every run inherits.
        record: called with each run that ended with 0; returns what is wrong with it, or "".
        until: time of `time.monotonic` after which running cells are stopped and no more are started; None: never.
        python: interpreter of the runs.
    """
    started = {task.cell.name: task for task in tasks if task.command}
    outcome = SweepOutcome({task.cell.name: task.problem for task in tasks if task.state == "other"})
    start = [python, "-P", "-m", "pflmpi"]
    commands = [(name, [*launcher(task), *start, *task.command], task.cell.log(out)) for name, task in started.items()]
    polls = run_all(commands, environments, *locks)
    with _collect_signals() as signals, closing(polls), SweepProgress(tasks, out) as progress:
        for running, ended in polls:
            if signals:
                break
            progress.running(running)
            for name, code in ended.items():
                text = f"{started[name].rounds} rounds"
                if code == Stopped.exit_code:
                    outcome.stopped.append(name)
                    text = "stopped"
                elif code:
                    outcome.failed[name] = _find_cause(started[name].cell.log(out), code)
                elif problem := record(started[name]):
                    outcome.failed[name] = problem
                if name in outcome.failed:
                    text = f"failed: {outcome.failed[name]}"
                progress.ended(name, text)
            if until is not None and time.monotonic() >= until:
                break
        outcome.signal = next(iter(signals), 0)  # also one that came while the last run ended
    return outcome


@contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Yields a list that collects stop signals: an exception in the middle of a start would lose a process."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _find_cause(log: Path, code: int) -> str:
    """The error that a run printed, or else its last line."""
    if code < 0:
        return f"killed by signal {-code}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return find_last_error(log) or (lines or [f"ended with {code}"])[-1]


class SweepProgress:
    """Shows the progress of a sweep: bars on a terminal, else a line when a run ends."""

    def __init__(self, tasks: Sequence[CellTask], out: Path) -> None:
        self._tasks = {task.cell.name: task for task in tasks}
        self._out = out
        self._ended = sum(not task.command for task in tasks)
        self._console = console(stderr=True)
        text = TextColumn("{task.description}", markup=False)
        self._bars = Progress(
            *(text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
            console=self._console,
            speed_estimate_period=_SPEED_WINDOW,
            disable=not self._console.is_terminal,
        )
        self._rounds = {task.cell.name: task.done if task.command else task.rounds for task in tasks}
        total = sum(task.rounds for task in tasks)
        self._all = self._bars.add_task("", total=total, completed=sum(self._rounds.values()))
        self._bar: dict[str, TaskID] = {}

    def __enter__(self) -> "SweepProgress":
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def running(self, names: Sequence[str]) -> None:
        if self._bars.disable:
            return
        for name in names:
            task = self._tasks[name]
            lines = metrics_file.read(task.cell.run(self._out))
            self._rounds[name] = max(task.done, int(lines[-1]["round"]) if lines else 0)
            if name not in self._bar:
                self._bar[name] = self._bars.add_task(name, total=task.rounds, completed=task.done)
            self._bars.update(self._bar[name], completed=self._rounds[name])
        self._show_all()

    def ended(self, name: str, text: str) -> None:
        self._ended += 1
        self._rounds[name] = self._tasks[name].rounds  # also for a failed one: no more rounds will come
        if name in self._bar:
            self._bars.remove_task(self._bar.pop(name))
        line = f"[{self._ended}/{len(self._tasks)}] {name}: {text}"
        self._console.print(line, highlight=False, soft_wrap=True)
        self._show_all()

    def _show_all(self) -> None:
        text = f"{self._ended}/{len(self._tasks)} runs, rounds"
        self._bars.update(self._all, completed=sum(self._rounds.values()), description=text)
