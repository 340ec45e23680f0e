"""Show runs side by side: options that differ, the main measure, losses, seconds and bytes.

pflmpi compare runs/mine runs/fedavg
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pflmpi import arguments
from pflmpi.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from pflmpi.analysis.selection import NamedRun
    from pflmpi.learning.main_measure import MainMeasure

_LEAST_WIDTH = 14  # characters of the column of a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        type=arguments.parse_folder,
        nargs="+",
        metavar="RUN",
        help="folders of runs, or of many runs such as sweeps/NAME; runs that differ in the seed alone are one column",
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print a table with a column for each run, or for those of several seeds; return the exit code."""
    from pflmpi.analysis.comparable import choose_main_measure, differing_options, why_incomparable
    from pflmpi.analysis.run import read_run
    from pflmpi.analysis.selection import name_runs
    from pflmpi.store.runs import find_runs
    from pflmpi.terminal import print_json

    paths = [run for path in options.runs for run in find_runs(path) or [path]]  # `read_run` refuses other folders
    folders = list({path.resolve(): path for path in paths}.values())
    if len(folders) < 2:
        raise ConfigError(f"there is only one run, {folders[0]}; name two or more")
    opened = [read_run(path) for path in folders]
    runs, settings, measure = name_runs(opened), differing_options(opened), choose_main_measure(opened)
    problems = [why_incomparable(opened[0], other) for other in opened]
    if options.json:
        pairs = zip(runs, problems, strict=True)
        listed = [_as_json(named_run, problem, measure, list(settings)) for named_run, problem in pairs]
        print_json({"differing_options": list(settings), "runs": listed})
    else:
        _show(runs, problems, settings, measure)
    return 0


def _show(
    runs: "Sequence[NamedRun]",
    problems: Sequence[str | None],
    settings: Mapping[str, Sequence[str]],
    measure: "MainMeasure",
) -> None:
    """Print the table, in parts as wide as the terminal, and what is to be noted of the runs.

    Args:
        problems: why each run cannot be compared with the first, None if it can.
        settings: of each option that differs, the text of each run.
    """
    from pflmpi.analysis.comparable import group_by_seed
    from pflmpi.analysis.summary import RUN, SEEDS, average_seeds, format_lines, summarize_run
    from pflmpi.terminal import console

    groups = group_by_seed(runs)
    titles = [group.title for group in groups]
    of_groups = {
        key: [", ".join(dict.fromkeys(texts[runs.index(named_run)] for named_run in group.runs)) for group in groups]
        for key, texts in settings.items()
    }
    lines = [{RUN: named_run.label, **summarize_run(named_run.run, measure)} for named_run in runs]
    texts = format_lines(average_seeds(runs, lines))
    figures = {
        column.title: [line[column] or "-" for line in texts]
        for column in texts[0]
        if column not in (RUN, SEEDS) and any(line[column] for line in texts)
    }
    terminal = console(highlight=False)
    name_width = max(map(len, (*of_groups, *figures)))
    column_width = max(_LEAST_WIDTH, *(len(text) for row in figures.values() for text in row))
    num_columns = max(1, (terminal.width - name_width - 2) // (column_width + 3))
    for begin in range(0, len(groups), num_columns):
        part = slice(begin, begin + num_columns)
        sections = [{name: row[part] for name, row in rows.items()} for rows in (of_groups, figures)]
        terminal.print(_table(titles[part], sections))
    for named_run in runs:
        for note in named_run.run.notes:
            terminal.print(f"{named_run.label}: {note}")
    for other, problem in zip(runs, problems, strict=True):
        if problem:
            terminal.print(f"{other.label} has other samples or clients than {runs[0].label}: {problem}")


def _as_json(named_run: "NamedRun", problem: str | None, measure: "MainMeasure", keys: list[str]) -> dict[str, Any]:
    """A run for JSON.

    Args:
        problem: why it cannot be compared with the first; None if it can.
        keys: the options that differ between the runs.
    """
    from pflmpi.analysis.comparable import collect_decisive_options
    from pflmpi.analysis.summary import summarize_run
    from pflmpi.learning.main_measure import ACCURACY

    run = named_run.run
    options = collect_decisive_options(run)
    of_main = {column.key: value for column, value in summarize_run(run, measure).items()}
    values: dict[str, Any] = {
        "run": run.path,
        "name": named_run.label,
        "options": {key: options.get(key) for key in keys},
        "measure": measure.column,
        "best": float(of_main[f"best_{measure.name}"]) / measure.scale,
        "last": float(of_main[measure.column]) / measure.scale,
    }
    for column, value in summarize_run(run, ACCURACY).items():
        is_share = column.scale != 1 and isinstance(value, float)
        values[column.key] = round(float(value) / column.scale, 9) if is_share else None if value == "" else value
    return {**values, "best_round": of_main["best_round"] or None, "notes": run.notes, "incomparable": problem}


def _table(names: list[str], sections: list[dict[str, list[str]]]) -> "Table":
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
