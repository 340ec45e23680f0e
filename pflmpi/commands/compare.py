"""Show runs side by side: options that differ, accuracy, losses, seconds and bytes."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflmpi import arguments
from pflmpi.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from pflmpi.analysis.run import Run
    from pflmpi.analysis.summary import Line

_LEAST = 14  # columns of the terminal for a run
_KEYS = {  # in JSON, of a column; shares of 1 where the column has percents
    "rounds": "rounds",
    "of": "planned_rounds",
    "best (%)": "best_accuracy",
    "in round": "best_round",
    "last (%)": "accuracy_mean",
    "std over clients (%)": "accuracy_std",
    "worst client (%)": "accuracy_worst_client",
    "lowest 10 % (%)": "accuracy_bottom",
    "macro F1 (%)": "f1_macro",
    "unseen (%)": "unseen_accuracy_mean",
    "after training (%)": "trained_accuracy_mean",
    "training loss": "train_loss",
    "test loss": "test_loss",
    "up (bytes)": "up_bytes",
    "down (bytes)": "down_bytes",
    "up, wire (bytes)": "wire_up_bytes",
    "down, wire (bytes)": "wire_down_bytes",
    "time (s)": "seconds",
    "time per round (s)": "seconds_per_round",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Registers the command-line arguments."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, two or more")
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print a table with a column for each run; return the exit code."""
    from pflmpi.analysis.comparable import differing_options, why_incomparable
    from pflmpi.analysis.run import open_run
    from pflmpi.analysis.selection import named
    from pflmpi.analysis.summary import for_readers, results
    from pflmpi.terminal import console, print_json

    folders = list({path.resolve(): path for path in options.runs}.values())
    if len(folders) < 2:
        raise ConfigError(f"there is only one run, {folders[0]}; name two or more")
    runs = [open_run(path) for path in folders]
    names, settings = [named_run.label for named_run in named(runs)], differing_options(runs)
    lines, problems = [results(run) for run in runs], [why_incomparable(runs[0], other) for other in runs]
    if options.json:
        of_runs = map(_of_run, runs, names, lines, problems, [list(settings)] * len(runs))
        print_json({"differing_options": list(settings), "runs": list(of_runs)})
        return 0
    columns = for_readers(lines)
    figures = {name: [column[name] or "-" for column in columns] for name in columns[0]}
    figures = {name: row for name, row in figures.items() if any(text != "-" for text in row)}
    terminal = console(highlight=False)
    first = max(map(len, (*settings, *figures)))
    at_once = max(1, (terminal.width - first) // (_LEAST + 2))
    for begin in range(0, len(runs), at_once):
        part = slice(begin, begin + at_once)
        sections = [{name: row[part] for name, row in rows.items()} for rows in (settings, figures)]
        terminal.print(_table(names[part], sections))
    for run, name in zip(runs, names, strict=True):
        for note in run.notes:
            terminal.print(f"{name}: {note}")
    for reason, name in zip(problems, names, strict=True):
        if reason:
            terminal.print(f"{name} has other samples or clients than {names[0]}: {reason}")
    return 0


def _of_run(run: "Run", name: str, line: "Line", problem: str | None, keys: list[str]) -> dict[str, Any]:
    """A run in JSON.

    Args:
        problem: why it cannot be compared with the first.
        keys: of the options that differ between the runs.
    """
    from pflmpi.analysis.comparable import decisive_options

    options, values = decisive_options(run), dict[str, Any]()
    for column, key in _KEYS.items():
        value = None if line[column] == "" else line[column]
        values[key] = round(value / 100, 9) if "%)" in column and isinstance(value, float) else value
    ours = {"run": run.path, "name": name, "options": {key: options.get(key) for key in keys}}
    return {**ours, **values, "notes": run.notes, "incomparable": problem}


def _table(names: list[str], sections: list[dict[str, list[str]]]) -> "Table":
    """The rows of each section, by name, of some runs."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("", *names, box=SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for rows in sections:
        for name, row in rows.items():
            table.add_row(name, *row)
        table.add_section()
    return table
