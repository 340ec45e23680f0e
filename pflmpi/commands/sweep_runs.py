"""The runs of a sweep as they go: started, watched, stopped together, and how each has ended."""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pflmpi.commands.overview import Overview
from pflmpi.errors import Stopped
from pflmpi.sweep.pending import Work
from pflmpi.sweep.processes import Job, run_all


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
    """Run what is to be run, and show how it goes.

    Args:
        launcher: words that start a run on its ranks; none where a run does so itself.
        environments: the variables for each of the runs that go on at a time.
        held: descriptors that every run keeps open.
    """
    started = {work.cell.name: work for work in works if work.command}
    outcome = Outcome({work.cell.name: work.problem for work in works if work.state == "other"})
    start = [*launcher, sys.executable, "-m", "pflmpi"]
    jobs = [Job(name, [*start, *work.command], work.cell.log(out)) for name, work in started.items()]
    looks = run_all(jobs, environments, *held)
    with _noted_signals() as signals, closing(looks), Overview(works, out) as overview:
        for look in looks:
            if signals:
                outcome.signal = signals[0]
                break
            overview.running(look.running)
            for name, code in look.ended.items():
                text = f"{started[name].rounds} rounds"
                if code == Stopped.exit_code:
                    outcome.stopped.append(name)
                    text = "stopped"
                elif code:
                    outcome.failed[name] = _cause(started[name].cell.log(out), code)
                    text = f"failed: {outcome.failed[name]}"
                overview.ended(name, text)
    return outcome


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Give the list of signals to stop that have come: an exception in the middle of a start would lose a process."""
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
    """Return the error that a run has shown, or else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    shown = [line.removeprefix("pflmpi: ") for line in lines if line.startswith("pflmpi: ")]
    return f"killed by signal {-code}" if code < 0 else (shown or lines or [f"ended with {code}"])[-1]
