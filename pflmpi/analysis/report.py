"""The report of `pflmpi report`, written to a folder: the page, its figures and their tables."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from pflmpi import atomic
from pflmpi.analysis import figures, summary
from pflmpi.analysis.comparable import (
    choose_main_measure,
    format_yaml,
    group_by_seed,
    open_comparable_runs,
)
from pflmpi.analysis.drawing import html
from pflmpi.analysis.drawing.html import FIGURES, PageFigure, PageTable, Section, draw_figures
from pflmpi.analysis.figures import Plots
from pflmpi.analysis.plots import Missing
from pflmpi.analysis.selection import NamedRun, SeedGroup, name_runs
from pflmpi.analysis.series.clients import describe_gains, plot_single_clients
from pflmpi.analysis.summary import FOLDER, ROUNDS, RUN, SEEDS, Column, Line, Value
from pflmpi.config.sections import by_key
from pflmpi.errors import CheckpointError
from pflmpi.learning.main_measure import ACCURACY, MainMeasure
from pflmpi.store import job_file
from pflmpi.text import format_csv, join_truncated

PAGE, _TABLE = "report.html", "runs.csv"


def write_report(
    paths: Sequence[Path],
    out: Path,
    update: Callable[[int, int], None],
    targets: Sequence[float] = (),
    pictures: Sequence[str] = (),
    reload: int = 0,
    made: str = "",
    whole: bool = False,
) -> list[str]:
    """Writes the report to a folder; returns what could not be read or compared and was left out, one line each.

    Args:
        update: called with the number of steps that are done, and of all.
        targets: accuracies, as shares, to which costs are counted; by default those of `choose_targets`.
        pictures, whole: see `draw_figures`.
        reload, made: see `html.build_page`.

    Raises:
        CheckpointError: none of the runs can be read.
        ConfigError: the folder cannot be written, or has such files that are not known to be from pflmpi.
    """
    done = 0
    total = len(paths)

    def step() -> None:
        nonlocal done
        done += 1
        update(done, total)

    readable_runs, problems = open_comparable_runs(paths, step)
    if not readable_runs:
        raise CheckpointError("; ".join(problems))
    runs = name_runs(readable_runs)
    groups = group_by_seed(runs)
    total += len(groups[: figures.MOST_DETAILED])
    with atomic.explain_write_error(f"the report in {out}", "choose another --out"):
        earlier = html.read_earlier_page(out / PAGE, _TABLE, ",folder,")
        lines = summary.summarize_runs(runs, targets or summary.choose_targets(readable_runs))
        texts = [summary.format_line(line) for line in lines]
        table = [list(texts[0]), *(list(line.values()) for line in texts)]
        atomic.write(out / _TABLE, format_csv(table).encode())
        details = []
        for group in groups[: figures.MOST_DETAILED]:
            plots, unreadable = figures.make_run_figures(group.runs[0])
            details.append(plots)
            problems += unreadable
            step()
        sections = _build_sections(runs, groups, lines, details, partial(draw_figures, out, pictures, whole=whole))
        title = f"{runs[0].label}: report" if len(runs) == 1 else f"{len(runs)} runs: report"
        page = html.build_page(title, _describe_data(runs), problems, sections, made, reload)
        html.finish_page(out / PAGE, page, earlier)
    return problems


def _build_sections(
    runs: Sequence[NamedRun],
    groups: Sequence[SeedGroup],
    lines: Sequence[Line],
    details: Sequence[Plots],
    draw: Callable[[Plots, str], list[PageFigure | Missing]],
) -> list[Section]:
    """The sections of the page: runs, overview, comparisons, single clients, single runs, settings.

    Args:
        details: the figures of the first run of each of the first groups.
    """
    measure = choose_main_measure([named_run.run for named_run in runs])
    sentences = [sentence for named_run in runs for sentence in _describe_run(named_run, runs)]
    text = " ".join([*sentences, describe_gains(runs)])
    table = build_runs_table(summary.average_seeds(runs, lines), measure)
    sections = [Section("Runs", text, table, [("What the columns are", summary.describe_columns(measure))])]
    firsts = [group.runs[0] for group in groups[: len(details)]]
    multiples, rest = figures.make_multiples([(run.label, plots) for run, plots in zip(firsts, details, strict=True)])
    comparisons = {**figures.make_comparison_figures(runs, groups), "Clients and layers over rounds": multiples}
    for index, (title, plots) in enumerate(comparisons.items()):
        if plots:
            sections.append(Section(title, figures=draw(plots, FIGURES), closed=index > 0))
    if client_figures := draw(plot_single_clients(firsts, details), FIGURES):
        sections.append(Section("Single clients", figures=client_figures, kind="client", closed=True))
    sections += _build_run_sections(groups, rest, draw)
    return [*sections, Section("Settings of the runs", table=build_settings_table(runs), closed=True)]


def _build_run_sections(
    groups: Sequence[SeedGroup],
    plots_of_groups: Sequence[Plots],
    draw: Callable[[Plots, str], list[PageFigure | Missing]],
) -> list[Section]:
    """A section for the first run of each of the first groups, and one that names the other groups."""
    sections = []
    for number, (group, plots) in enumerate(zip(groups, plots_of_groups, strict=False), 1):
        named_run, seeds = group.runs[0], len(group.runs)
        name = re.sub(r"[^A-Za-z0-9]+", "-", named_run.label).strip("-") or "run"
        text = str(named_run.run.path)
        if seeds > 1:
            text += f", the first of {seeds} that differ in the seed alone"
        drawn = draw(plots, f"{FIGURES}/{number:02d}-{name}")
        sections.append(Section(named_run.label, text, figures=drawn, closed=True))
    if others := ", ".join(group.title for group in groups[figures.MOST_DETAILED :]):
        text = f"Only the first {figures.MOST_DETAILED} runs are shown one by one; report the others by themselves"
        sections.append(Section("Other runs", f"{text}: {others}."))
    return sections


def _describe_run(named_run: NamedRun, runs: Sequence[NamedRun]) -> Iterator[str]:
    """Sentences about a run: an early stop, its Slurm jobs, the run it is a fork of, and notes."""
    run, label = named_run.run, named_run.label
    if why := run.stopped_early:
        last, rounds = int(run.columns["round"][-1]), run.config["training"]["rounds"]
        yield f"{label} stopped early after round {last} of {rounds}: {why}."
    if usage := job_file.compute_usage(run.path):
        yield f"{label} used {usage}."
    for other in runs if named_run.first else ():
        if run.shared_rounds(other.run):
            yield f"{label} left {other.label} after round {named_run.first}, and is drawn from there."
    yield from (f"{label}: {note}." for note in run.notes)


def _describe_data(runs: Sequence[NamedRun]) -> str:
    """The dataset, partition and number of clients of the first run."""
    config = runs[0].run.config
    names = [str(config.get(section, {}).get("name", "?")) for section in ("data", "partition")]
    clients = config.get("partition", {}).get("clients")
    return f"Data {names[0]}, partition {names[1]}" + (f", {clients} clients." if clients else ".")


# --- the table of runs


_MOST_OWNERS = 8  # labels of runs for one value of a setting
_MOST_COLUMNS, _MOST_OPTIONS = 8, 2  # that are shown at first


def build_runs_table(lines: Sequence[Line], measure: MainMeasure = ACCURACY) -> PageTable:
    """The table of runs on the page, with the best values marked, and optional columns beyond eight.

    `runs.csv` has more columns, unscaled bytes, and the full paths of the folders.
    """
    folders = _shorten_folders([str(line[FOLDER]) for line in lines])
    lines = [
        {**{column: value for column, value in line.items() if column.is_on_page and column != FOLDER}, FOLDER: folder}
        for line, folder in zip(lines, folders, strict=True)
    ]
    rows = summary.format_lines(lines)
    columns = [*rows[0]]
    marked = [
        (row, index)
        for index, column in enumerate(column for column in lines[0] if not column.is_deviation)
        for row in _find_best_rows(column.better, [line[column] for line in lines])
    ]
    shown = _choose_columns(columns, rows, measure)
    optional = [index for index, column in enumerate(columns) if column not in shown]
    cells = [[*row.values()] for row in rows]
    return PageTable([column.title for column in columns], cells, long=1, marked=marked, optional=optional)


def _choose_columns(
    columns: Sequence[Column], rows: Sequence[Mapping[Column, str]], measure: MainMeasure
) -> list[Column]:
    """The columns that a reader sees at first: up to eight, of which two are options that all runs have."""
    of_key = {column.key: column for column in reversed(columns)}  # the first with each key
    best, name = f"best_{measure.name}", measure.name
    options = [column for column in columns[: columns.index(ROUNDS)] if column not in (RUN, SEEDS, Column("seed"))]
    keys = [measure.column, best, f"{name}_worst_client", "gain", "rounds_to", "bytes_to", "seconds", f"{name}_bottom"]
    if f"best_validation_{name}" in of_key:  # then no test sample chose the best round
        keys.insert(0, best)
    candidates = [RUN, SEEDS, *[column for column in options if all(row[column] for row in rows)][:_MOST_OPTIONS]]
    candidates += [of_key[key] for key in keys if key in of_key]
    return [column for column in dict.fromkeys(candidates) if column in columns][:_MOST_COLUMNS]


def _find_best_rows(better: str, values: Sequence[Value]) -> list[int]:
    """The rows with the best value of a column; none if fewer than two have a value, or no direction is better."""
    known = {row: value for row, value in enumerate(values) if not isinstance(value, str) and value == value}
    if not better or len(known) < 2:
        return []
    best = min(known.values()) if better == "lower" else max(known.values())
    return [row for row, value in known.items() if value == best]


def build_settings_table(runs: Sequence[NamedRun]) -> PageTable:
    """The complete configurations with their section `recorded`: a line for each value of a setting, with its runs."""
    owners: dict[str, dict[str, list[str]]] = {}  # key -> value -> labels
    for named_run in runs:
        for key, value in by_key(named_run.run.config).items():
            owners.setdefault(key, {}).setdefault(format_yaml(value), []).append(named_run.label)
    rows = [
        (key, value, "all" if len(labels) == len(runs) else join_truncated(labels, _MOST_OWNERS))
        for key, values in owners.items()
        for value, labels in values.items()
    ]
    return PageTable(["setting", "value", "runs"], rows, names=3)


def _shorten_folders(folders: Sequence[str]) -> Sequence[str]:
    """Paths relative to the deepest folder that contains all of them; a single one is unchanged."""
    if len(set(folders)) == 1:
        return folders
    parent = os.path.commonpath([os.path.dirname(os.path.abspath(folder)) for folder in folders])
    return [os.path.relpath(folder, parent) for folder in folders]
