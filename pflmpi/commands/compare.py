"""Show runs side by side: options that differ, accuracy, losses, seconds and bytes."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pflmpi.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

_LEAST = 14  # columns of the terminal for a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Registers the command-line arguments."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, two or more")


def run(options: argparse.Namespace) -> int:
    """Print a table with a column for each run; return the exit code."""
    from pflmpi.analysis.comparable import differing_options, why_incomparable
    from pflmpi.analysis.run import open_run
    from pflmpi.analysis.selection import named
    from pflmpi.analysis.summary import for_readers, results
    from pflmpi.terminal import console

    folders = list({path.resolve(): path for path in options.runs}.values())
    if len(folders) < 2:
        raise ConfigError(f"there is only one run, {folders[0]}; name two or more")
    runs = [open_run(path) for path in folders]
    names, settings = [named_run.label for named_run in named(runs)], differing_options(runs)
    columns = for_readers([results(run) for run in runs])
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
    for other, name in zip(runs[1:], names[1:], strict=True):
        if reason := why_incomparable(runs[0], other):
            terminal.print(f"{name} has other samples or clients than {names[0]}: {reason}")
    return 0


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
