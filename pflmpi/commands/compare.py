"""Show runs side by side: options that differ, the main measure, losses, seconds and bytes.

pflmpi compare runs/mine runs/fedavg
"""

import argparse
from typing import TYPE_CHECKING, Any

from pflmpi import arguments
from pflmpi.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from pflmpi.analysis.selection import NamedRun
    from pflmpi.learning.main_measure import MainMeasure

_LEAST = 14  # columns of the terminal for a run
_KEYS = {  # in JSON, of a column; shares of 1 where the column has percents
    "rounds": "rounds",
    "of": "planned_rounds",
    "best (%)": "best_accuracy",
    "in round": "best_round",
    "validation (%)": "best_validation_accuracy",
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
    parser.add_argument(
        "runs",
        type=arguments.folder,
        nargs="+",
        metavar="RUN",
        help="folders of runs, or of many runs such as sweeps/NAME; runs that differ in the seed alone are one column",
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print a table with a column for each run, or for those of several seeds; return the exit code."""
    from pflmpi.analysis.comparable import (
        differing_options,
        main_measure,
        seed_groups,
        unlike_lengths,
        why_incomparable,
    )
    from pflmpi.analysis.run import open_run
    from pflmpi.analysis.runs import runs_in
    from pflmpi.analysis.selection import named
    from pflmpi.analysis.summary import for_readers, over_seeds, results
    from pflmpi.terminal import console, print_json

    paths = [run for path in options.runs for run in runs_in(path) or [path]]  # what is no run is refused below
    folders = list({path.resolve(): path for path in paths}.values())
    if len(folders) < 2:
        raise ConfigError(f"there is only one run, {folders[0]}; name two or more")
    runs = named([open_run(path) for path in folders])
    of_runs, measure = differing_options([one.run for one in runs]), main_measure([one.run for one in runs])
    problems = [why_incomparable(runs[0].run, other.run) for other in runs]
    if options.json:
        print_json(
            {
                "differing_options": list(of_runs),
                "runs": [_of_run(*pair, measure, list(of_runs)) for pair in zip(runs, problems, strict=True)],
            }
        )
        return 0
    lines = [results(one.run, measure) for one in runs]
    groups = seed_groups(runs)
    names = [group.title for group in groups]
    settings = {
        key: [", ".join(dict.fromkeys(texts[runs.index(named_run)] for named_run in group.runs)) for group in groups]
        for key, texts in of_runs.items()
    }
    labelled = [{"run": named_run.label, **line} for named_run, line in zip(runs, lines, strict=True)]
    columns = for_readers(over_seeds(runs, labelled))
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
    for line in unlike_lengths(groups):
        terminal.print(line)
    for other, reason in zip(runs, problems, strict=True):
        if reason:
            terminal.print(f"{other.label} has other samples or clients than {runs[0].label}: {reason}")
    return 0


def _of_run(named_run: "NamedRun", problem: str | None, measure: "MainMeasure", keys: list[str]) -> dict[str, Any]:
    """A run in JSON.

    Args:
        problem: why it cannot be compared with the first.
        keys: of the options that differ between the runs.
    """
    from pflmpi.analysis.comparable import decisive_options
    from pflmpi.analysis.summary import column_of, results
    from pflmpi.learning.main_measure import ACCURACY

    options, line = decisive_options(named_run.run), results(named_run.run, ACCURACY)
    of_main = {column_of(name): value for name, value in results(named_run.run, measure).items()}
    values: dict[str, Any] = {"measure": measure.column}
    values |= {key: float(of_main[key]) / measure.scale for key in ("best", "last")}
    for column, key in _KEYS.items():
        value = None if line[column] == "" else line[column]
        values[key] = round(value / 100, 9) if "%)" in column and isinstance(value, float) else value
    values["best_round"] = of_main["in round"] or None
    ours = {"run": named_run.run.path, "name": named_run.label, "options": {key: options.get(key) for key in keys}}
    return {**ours, **values, "notes": named_run.run.notes, "incomparable": problem}


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
