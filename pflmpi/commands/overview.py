"""What the user sees of a sweep while it goes: bars on a terminal, elsewhere a line as each run ends."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pflmpi.store import metrics_file
from pflmpi.sweep.pending import Work

_WINDOW = 1800.0  # seconds over which the speed is measured: rounds of unlike cells take unlike times


class Overview:
    """Shows how many runs and rounds of a sweep are done, the runs going on, and how each has ended."""

    def __init__(self, works: Sequence[Work], out: Path) -> None:
        self._works = {work.cell.name: work for work in works}
        self._out = out
        self._ended = sum(not work.command for work in works)
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Progress(
            *columns, console=self._console, speed_estimate_period=_WINDOW, disable=not self._console.is_terminal
        )
        self._rounds = {work.cell.name: work.done if work.command else work.rounds for work in works}
        total = sum(work.rounds for work in works)
        self._all = self._bars.add_task("", total=total, completed=sum(self._rounds.values()))
        self._bar: dict[str, TaskID] = {}

    def __enter__(self) -> "Overview":
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
