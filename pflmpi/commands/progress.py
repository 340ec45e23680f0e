"""What the user sees of a run: a bar or lines while it goes, a table at the end. Rank 0 only."""

import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pflmpi.config.load import Config
from pflmpi.runtime.progress import Progress as Round
from pflmpi.store import metrics_file
from pflmpi.text import size


class Display:
    """Shows rounds as they end. On a terminal a progress bar, elsewhere (a batch job's log) one line each."""

    def __init__(self, config: Config, quiet: bool, bar: bool) -> None:
        self._total = config.training.rounds
        self._quiet = quiet
        self._console = Console(stderr=True, force_terminal=True if bar else None)
        self._accuracy = "-"
        self._moved = [0, 0]
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("round", total=self._total)
            self._bar.start()

    def __call__(self, round: Round) -> None:
        """Show the end of a round."""
        if round.scores is not None:
            self._accuracy = f"{100 * round.scores.mean:.2f} %"
        up, down = int(round.bytes["up"].sum()), int(round.bytes["down"].sum())
        self._moved = [self._moved[0] + up, self._moved[1] + down]
        if self._bar is not None:
            moved = f"up {size(self._moved[0])}  down {size(self._moved[1])}"
            self._bar.update(self._task, completed=round.round, description=f"accuracy {self._accuracy}  {moved}")
        elif not self._quiet:
            print(
                f"round {round.round}/{self._total}  participants {len(round.participants)}  "
                f"{round.seconds['round']:.2f} s  up {size(up)}  down {size(down)}  accuracy {self._accuracy}",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def finish(self, run: Path, config: Config) -> None:
        """Show the table of a finished run."""
        self.close()
        Console().print(table(run, config))
        print(f"run: {run}", flush=True)


def table(run: Path, config: Config) -> Table:
    """Return the summary of a run from its metrics file."""
    rows = metrics_file.read(run)
    tested = [row for row in rows if row["accuracy_mean"]]
    summary = Table(
        title=f"{config.resolved()['algorithm']['name']} on {config.data.name}", title_style="", show_header=False
    )
    summary.add_row("rounds", str(len(rows)))
    if tested:
        mean = np.array([float(row["accuracy_mean"]) for row in tested])
        best = tested[int(mean.argmax())]
        summary.add_row("last accuracy, mean over clients", f"{100 * mean[-1]:.2f} %")
        summary.add_row("last accuracy, over all samples", f"{100 * float(tested[-1]['accuracy_weighted']):.2f} %")
        summary.add_row("best accuracy, mean over clients", f"{100 * mean.max():.2f} % (round {best['round']})")
        summary.add_row("spread over clients at the end", f"{100 * float(tested[-1]['accuracy_std']):.2f} %")
    for way in ("up", "down"):
        logical, wire = (sum(int(row[f"{key}_bytes"]) for row in rows) for key in (way, f"wire_{way}"))
        summary.add_row(f"{way}: as papers count, on the wire", f"{size(logical)}, {size(wire)}")
    seconds = sum(float(row["seconds"]) for row in rows)
    summary.add_row("seconds, per round", f"{seconds:.1f}, {seconds / max(len(rows), 1):.3f}")
    return summary
