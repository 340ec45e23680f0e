"""Follow runs in the terminal until they end: rounds, the main measure, time left.

pflmpi watch runs/mine
"""

import argparse
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pflmpi import arguments
from pflmpi.errors import ConfigError
from pflmpi.text import for_shell, printable

if TYPE_CHECKING:
    from rich.table import Table

    from pflmpi.cluster.run_status import RunStatus
    from pflmpi.cluster.waiting import Writers

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        type=arguments.parse_folder,
        nargs="+",
        metavar="RUN",
        help="folders of runs, or of many runs such as a sweep",
    )
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="between two looks at the files (default: 2)"
    )


def run(options: argparse.Namespace) -> int:
    from rich.live import Live

    from pflmpi.cluster import run_status, waiting
    from pflmpi.terminal import console

    if not 0 < options.every < float("inf"):
        raise ConfigError(f"--every {options.every:g}: must be seconds, more than 0")
    writers, terminal = waiting.Writers(), console()
    shown: dict[Path, tuple[int, bool]] = {}
    live = Live(console=terminal, auto_refresh=False) if terminal.is_terminal else nullcontext()
    with live as table:
        while True:
            states = {path: run_status.read_run_status(path) for path in find_runs(options.runs)}
            unfinished = [path for path, state in states.items() if not (state and (state.done or state.problem))]
            running = {path for path in unfinished if writers.is_writing(path)}
            if table is not None:
                table.update(_table(states, running), refresh=True)
            else:
                _print_changes(states, running, shown)
            if not running and not are_running(options.runs, writers):
                break
            time.sleep(options.every)
    return waiting.wait([], options.runs, os.environ, of_sweep=len(options.runs) > 1)


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The runs in folders, so far; raises `ConfigError` for a folder that does not exist."""
    from pflmpi.cluster.jobs import find_runs_below

    if missing := [path for path in folders if not path.is_dir()]:
        raise ConfigError(f"{missing[0]} is no folder; name that of a run, as `pflmpi run` or `submit` printed it")
    return [run for path in folders for run in find_runs_below(path) or [path]]


def are_running(folders: Sequence[Path], writers: "Writers") -> bool:
    """Whether one of the runs in some folders is being written, or another may still begin there."""
    may_begin = writers.are_writing(folders) or any([writers.may_begin(folder, os.environ) for folder in folders])
    return may_begin or writers.are_writing(folders)  # which has begun in between


def _print_changes(
    states: "Mapping[Path, RunStatus | None]", running: Collection[Path], shown: dict[Path, tuple[int, bool]]
) -> None:
    """Print a line for each run that has completed a round, or ended, since it was last shown."""
    from pflmpi.cluster.run_status import summarize_progress

    for run, state in states.items():
        now = (state.round if state else 0, run in running)
        if shown.get(run) != now:
            shown[run] = now
            print(printable(f"{run}  {summarize_progress(state, None)}{_ending(run, state, running)}"), flush=True)


def _ending(run: Path, state: "RunStatus | None", running: Collection[Path]) -> str:
    """A hint for a run that ended before its last round; "" for others."""
    ended_early = state is not None and not state.done and not state.problem and run not in running
    return f"; ended before the last round: `pflmpi resume {for_shell(run)}` continues it" if ended_early else ""


def _table(states: "Mapping[Path, RunStatus | None]", running: Collection[Path]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from pflmpi.store import metrics_file

    measures = list(dict.fromkeys(state.measure.words for state in states.values() if state and state.last is not None))
    measure = ", ".join(measures) or "measure"
    table = Table("run", "round", measure, "", "best", "ranks", "per round", "left", box=SIMPLE_HEAD, pad_edge=False)
    for run, state in states.items():
        if state is None or state.problem:
            table.add_row(str(run), state.problem if state else "not begun")
            continue
        values = [float(text) for line in metrics_file.read(run) if (text := line.get(state.measure.column))]
        name = f"{state.measure.words} " if len(measures) > 1 else ""
        table.add_row(
            str(run),
            f"{state.round}/{state.rounds}",
            "-" if state.last is None else f"{name}{state.measure.text(state.last)}",
            sparkline(values),
            "-" if state.best is None else f"{state.measure.text(state.best[0])} ({state.best[1]})",
            str(state.ranks or "-"),
            "-" if state.per_round is None else f"{state.per_round:.2f} s",
            _time_left(state, run in running),
        )
    return table


def _time_left(state: "RunStatus", is_running: bool) -> str:
    from pflmpi.cluster.run_status import format_duration

    if state.done:
        return "done"
    if not is_running:
        return "ended"
    return "-" if state.to_end is None else format_duration(state.to_end)


def sparkline(values: Sequence[float]) -> str:
    """Draw values as bars between the lowest and the highest; of many, some evenly spaced ones and the last.

    >>> sparkline([0.1, 0.5, 0.8]), sparkline([0.5]), sparkline([])
    ('▁▅█', '▁', '')
    """
    count = min(len(values), _MOST_BARS)
    chosen = [values[(number + 1) * len(values) // count - 1] for number in range(count)]
    low, high = min(chosen, default=0.0), max(chosen, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round(scale * (value - low))] for value in chosen)
