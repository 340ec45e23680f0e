"""What `sweep` prints: the runs that it would do, and how they ended."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pflmpi.sweep.pending import CellTask
from pflmpi.sweep.runs import SweepOutcome


def conclude(works: Sequence[CellTask], outcome: SweepOutcome, out: Path, rest: str) -> None:
    """Print how many runs are done, and why others are not; `rest` says what those are that go on next time."""
    before = sum(work.state == "done" for work in works)
    failed, stopped = outcome.failed, outcome.stopped
    done = len(works) - len(failed) - len(stopped)
    more = f", {len(stopped)} {rest}; the same command goes on" if stopped else ""
    print(f"{len(works)} runs: {done} done ({before} of them before), {len(failed)} failed{more}")
    logs = {work.cell.name: work.cell.log(out) for work in works if work.command}
    for cause in dict.fromkeys(failed.values()):
        print(f"failed: {cause}", file=sys.stderr)
        for name in (name for name, text in failed.items() if text == cause):
            print(f"  {name}  {logs.get(name, '')}".rstrip(), file=sys.stderr)


def show_plan(works: Sequence[CellTask], launcher: Sequence[str]) -> None:
    """Print the runs in their order, and the commands that would be started."""
    width = max(len(work.cell.name) for work in works)
    for work in works:
        print(f"{work.cell.name:{width}}  {work.done}/{work.rounds} rounds  {work.state}  {work.problem}".rstrip())
    for work in works:
        if work.command:
            print(shlex.join([*launcher, "pflmpi", *work.command]))
