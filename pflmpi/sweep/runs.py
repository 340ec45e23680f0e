"""The runs of a sweep: started, shown while they run, stopped together, and how each has ended."""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pflmpi.errors import Stopped
from pflmpi.store import metrics_file
from pflmpi.sweep.pending import Work
from pflmpi.sweep.processes import Job, run_all

_WINDOW = 1800.0  # seconds over which the speed is measured: rounds of different cells take different times


@dataclass
class Outcome:
    """How the runs of a sweep have ended.

    Attributes:
        failed: by the name of a cell, what is wrong with it.
        stopped: the cells whose runs were asked to stop, and can be continued.
        signal: the one that has stopped the whole sweep; 0 if none has.
    """

    failed: dict[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    signal: int = 0


def run_cells(
    works: Sequence[Work],
    out: Path,
    launcher: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    held: Sequence[int],
) -> Outcome:
    """Run what is not done, and show it.

    Args:
        launcher: words that start a run on its ranks; none where a run does so itself.
        environments: the variables for each of the runs at a time.
        held: descriptors that every run keeps open.
    """
    started = {work.cell.name: work for work in works if work.command}
    outcome = Outcome({work.cell.name: work.problem for work in works if work.state == "other"})
    start = [*launcher, sys.executable, "-m", "pflmpi"]
    jobs = [Job(name, [*start, *work.command], work.cell.log(out)) for name, work in started.items()]
    looks = run_all(jobs, environments, *held)
    with _noted_signals() as signals, closing(looks), SweepProgress(works, out) as progress:
        for look in looks:
            if signals:
                outcome.signal = signals[0]
                break
            progress.running(look.running)
            for name, code in look.ended.items():
                text = f"{started[name].rounds} rounds"
                if code == Stopped.exit_code:
                    outcome.stopped.append(name)
                    text = "stopped"
                elif code:
                    outcome.failed[name] = _cause(started[name].cell.log(out), code)
                    text = f"failed: {outcome.failed[name]}"
                progress.ended(name, text)
    return outcome


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Yield a list of the signals that ask to stop: an exception in the middle of a start would lose a process."""
    noted: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cause(log: Path, code: int) -> str:
    """The error that a run has shown, or else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    shown = [line.removeprefix("pflmpi: ") for line in lines if line.startswith("pflmpi: ")]
    return f"killed by signal {-code}" if code < 0 else (shown or lines or [f"ended with {code}"])[-1]


class SweepProgress:
    """Shows a sweep: bars on a terminal, elsewhere a line as each run ends."""

    def __init__(self, works: Sequence[Work], out: Path) -> None:
        self._works = {work.cell.name: work for work in works}
        self._out = out
        self._ended = sum(not work.command for work in works)
        self._console = Console(stderr=True)
        text = TextColumn("{task.description}", markup=False)
        self._bars = Progress(
            *(text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
            console=self._console,
            speed_estimate_period=_WINDOW,
            disable=not self._console.is_terminal,
        )
        self._rounds = {work.cell.name: work.done if work.command else work.rounds for work in works}
        total = sum(work.rounds for work in works)
        self._all = self._bars.add_task("", total=total, completed=sum(self._rounds.values()))
        self._bar: dict[str, TaskID] = {}

    def __enter__(self) -> "SweepProgress":
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def running(self, names: Sequence[str]) -> None:
        """Show how far these runs are, where there are bars."""
        if self._bars.disable:
            return
        for name in names:
            work = self._works[name]
            lines = metrics_file.read(work.cell.run(self._out))
            self._rounds[name] = max(work.done, int(lines[-1]["round"]) if lines else 0)
            if name not in self._bar:
                self._bar[name] = self._bars.add_task(name, total=work.rounds, completed=work.done)
            self._bars.update(self._bar[name], completed=self._rounds[name])
        self._show_all()

    def ended(self, name: str, text: str) -> None:
        """Show how a run has ended."""
        self._ended += 1
        self._rounds[name] = self._works[name].rounds  # also of a failed one: nothing more is to come
        if name in self._bar:
            self._bars.remove_task(self._bar.pop(name))
        line = f"[{self._ended}/{len(self._works)}] {name}: {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._show_all()

    def _show_all(self) -> None:
        text = f"{self._ended}/{len(self._works)} runs, rounds"
        self._bars.update(self._all, completed=sum(self._rounds.values()), description=text)
