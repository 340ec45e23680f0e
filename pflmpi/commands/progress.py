"""Progress on the terminal: a bar for slow work, the rounds of a run, and a table at its end."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pflmpi.cluster.run_status import estimate_seconds_per_round, format_duration
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.learning.main_measure import main_measure, summarize_rounds
from pflmpi.store import job_file, metrics_file
from pflmpi.terminal import console
from pflmpi.text import format_bytes, printable, short_name

if TYPE_CHECKING:  # both need torch, and `bar` is used without it
    from pflmpi.config.load import Config
    from pflmpi.runtime.progress import Progress as Round


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `update(done, total)`, which shows a bar on a terminal and nothing elsewhere."""
    terminal = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def round_display() -> Callable[[str], None]:
    """Make the function that shows the line of a round: in a notebook it replaces the last, elsewhere it is printed."""
    if not console().is_jupyter:
        return lambda line: print(line, file=sys.stderr, flush=True)
    displays: list[Any] = []  # one, made by the first call

    def show(text: str) -> None:
        content = {"text/plain": printable(text)}
        if displays:
            displays[0].update(content, raw=True)
        else:
            displays.append(import_module("IPython.display").display(content, raw=True, display_id=True))

    return show


class RunProgress:
    """Shows rounds as they end: as a bar on a terminal, as one changing line in a notebook, elsewhere as a line each.

    Every rank makes one, but only rank 0 calls it and shows anything.

    Args:
        bar: show the bar even if stderr is not a terminal.
    """

    def __init__(self, config: "Config", quiet: bool, bar: bool, rank: int) -> None:
        self._rounds = rounds = config.training.rounds
        self._quiet = quiet
        self._config = config.resolved()
        self._score = f"{main_measure(self._config, ()).words} -"
        self._up_bytes, self._down_bytes = 0, 0
        self._seconds: list[dict[str, float]] = []  # as in metrics.csv, of rounds of this process
        terminal = console(stderr=True, force_terminal=True if bar else None)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        hidden = quiet or rank > 0 or not terminal.is_terminal
        self._bar = Progress(*columns, console=terminal, refresh_per_second=4, disable=hidden)
        self._show_line = round_display()
        self._task = self._bar.add_task("round", total=rounds)

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def __call__(self, round: "Round") -> None:
        if round.scores is not None:
            tested = summarize_rounds(self._config, [round.columns])
            measure, values = tested.measure, tested.last or {}
            self._score = f"{measure.words} {measure.text(values.get(measure.column, math.nan))}"
            if (unseen := values.get(f"unseen_{measure.column}")) is not None:
                self._score += f" (unseen {measure.text(unseen)})"
        up, down = int(round.bytes["up"].sum()), int(round.bytes["down"].sum())
        self._up_bytes, self._down_bytes = self._up_bytes + up, self._down_bytes + down
        testing = round.seconds["evaluation"]
        self._seconds.append({"seconds": round.seconds["round"], "evaluation_seconds": testing})
        del self._seconds[1:-10]  # `estimate_seconds_per_round` uses the last ones
        left = (self._rounds - round.round) * (estimate_seconds_per_round(self._seconds) or 0.0)
        rest = f"  left {format_duration(left)}" if round.round < self._rounds else ""
        if testing > round.seconds["compute"] / 2:  # so much that `evaluation.every` is worth setting
            rest = f"  testing {testing:.2f} s{rest}"
        if not self._bar.disable:
            traffic = f"up {format_bytes(self._up_bytes)}  down {format_bytes(self._down_bytes)}"
            self._bar.update(self._task, completed=round.round, description=f"{self._score}  {traffic}{rest}")
        elif not self._quiet:
            self._show_line(
                f"round {round.round}/{self._rounds}  participants {len(round.participants)}  "
                f"{round.seconds['round']:.2f} s  up {format_bytes(up)}  down {format_bytes(down)}  {self._score}{rest}"
            )


def show_summary(run: Path, config: "Config") -> None:
    """Show the table of a finished run, from its metrics file, and its folder."""
    rows = metrics_file.read(run)
    raw = config.resolved()
    tested = summarize_rounds(raw, rows)
    measure, last, best = tested.measure, tested.last, tested.best
    title = f"{short_name(raw['algorithm']['name'])} on {config.data.name}"
    table = Table(title=title, title_style="", show_header=False)
    early = EarlyStop(config.training.stop, rows)
    table.add_row("rounds", f"{len(rows)} of {config.training.rounds}: {early.why}" if early.met else str(len(rows)))
    if last and best:
        name, column, judge = measure.words, measure.column, tested.judge
        by = "" if judge == column else f", by validation {name} {measure.text(best[judge])}"
        of_last = {
            f"last {name}, mean over clients": column,
            f"last {name}, over all samples": f"{measure.name}_weighted",
            "spread over clients at the end": f"{measure.name}_std",
            f"last {name} of unseen clients, mean": f"unseen_{column}",
        }
        lines = {words: measure.text(last[column]) for words, column in of_last.items() if column in last}
        best_line = f"{measure.text(best[column])} (round {best['round']:.0f}{by})"
        for words, text in {f"best {name}, mean over clients": best_line, **lines}.items():
            table.add_row(words, text)
    if skipped := sum(int(row["skipped"]) for row in rows):
        table.add_row("updates skipped, as clients failed", str(skipped))
    _add_costs(table, rows)
    console().print(table)
    show_usage(run)
    print(f"run: {run}", flush=True)


def _add_costs(table: Table, rows: Sequence[Mapping[str, str]]) -> None:
    """Add bytes and seconds of all rounds; totals are "-" if the figures of some rounds were lost."""
    seconds = [float(row["seconds"]) for row in rows if row["seconds"]]
    lost = len(rows) - len(seconds)
    for way in ("up", "down"):
        logical = sum(int(row[f"{way}_bytes"]) for row in rows)
        wire = sum(int(row[f"wire_{way}_bytes"]) for row in rows)
        total = "-" if lost else f"{format_bytes(logical)}, {format_bytes(wire)}"
        table.add_row(f"{way}: as papers count, on the wire", total)
    slowest = sum(float(row.get("compute_seconds") or 0) for row in rows)
    waiting = sum(float(row.get("waiting_seconds") or 0) for row in rows)
    if waiting:
        table.add_row("computing: the slowest rank, over the mean", f"{slowest / max(slowest - waiting, 1e-9):.2f}")
    total = "-" if lost else f"{sum(seconds):.1f}"
    table.add_row("seconds, per round", f"{total}, {sum(seconds) / max(len(seconds), 1):.3f}")
    if lost:
        table.add_row("rounds without figures, as metrics.csv was lost", str(lost))


def show_usage(run: Path) -> None:
    """Show what the jobs of a run have used, if jobs have started it."""
    if usage := job_file.compute_usage(run):
        print(f"used: {printable(usage)}", flush=True)
