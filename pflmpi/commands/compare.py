"""Show runs side by side: options that differ, accuracy, losses, seconds and bytes."""

import argparse
from typing import TYPE_CHECKING

from pflmpi import arguments
from pflmpi.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

_LEAST = 14  # columns of the terminal for a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Registers the command-line arguments."""
    parser.add_argument(
        "runs",
        type=arguments.folder,
        nargs="+",
        metavar="RUN",
        help="folders of runs, or of many runs such as sweeps/NAME; runs that differ in the seed alone are one column",
    )


def run(options: argparse.Namespace) -> int:
    """Print a table with a column for each run, or for those of several seeds; return the exit code."""
    from pflmpi.analysis.comparable import differing_options, seed_groups, why_incomparable
    from pflmpi.analysis.run import open_run
    from pflmpi.analysis.runs import runs_in
    from pflmpi.analysis.selection import named
    from pflmpi.analysis.summary import for_readers, over_seeds, results
    from pflmpi.terminal import console

    paths = [run for path in options.runs for run in runs_in(path) or [path]]  # what is no run is refused below
    folders = list({path.resolve(): path for path in paths}.values())
    if len(folders) < 2:
        raise ConfigError(f"there is only one run, {folders[0]}; name two or more")
    runs = named([open_run(path) for path in folders])
    groups, of_runs = seed_groups(runs), differing_options([named_run.run for named_run in runs])
    names = [group.title for group in groups]
    settings = {
        key: [", ".join(dict.fromkeys(texts[runs.index(named_run)] for named_run in group.runs)) for group in groups]
        for key, texts in of_runs.items()
    }
    columns = for_readers(over_seeds(runs, [{"run": named_run.label, **results(named_run.run)} for named_run in runs]))
    figures = {name: [column[name] or "-" for column in columns] for name in columns[0] if name not in ("run", "seeds")}
    figures = {name: row for name, row in figures.items() if any(text != "-" for text in row)}
    terminal = console(highlight=False)
    first = max(map(len, (*settings, *figures)))
    widest = max(_LEAST, *(len(text) for row in figures.values() for text in row))
    at_once = max(1, (terminal.width - first - 2) // (widest + 3))
    for begin in range(0, len(groups), at_once):
        part = slice(begin, begin + at_once)
        sections = [{name: row[part] for name, row in rows.items()} for rows in (settings, figures)]
        terminal.print(_table(names[part], sections))
    for named_run in runs:
        for note in named_run.run.notes:
            terminal.print(f"{named_run.label}: {note}")
    for other in runs[1:]:
        if reason := why_incomparable(runs[0].run, other.run):
            terminal.print(f"{other.label} has other samples or clients than {runs[0].label}: {reason}")
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
