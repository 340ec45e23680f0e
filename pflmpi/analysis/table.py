"""The table of a sweep: from the metrics of its runs, beside the published figures; as Markdown, CSV and LaTeX."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.analysis.comparable import main_measure, select_decisive_options
from pflmpi.analysis.metrics import CostTo, compute_cost_to
from pflmpi.analysis.run import Run, open_run
from pflmpi.config import yaml_file
from pflmpi.config.sections import by_key, differing, section
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.learning.main_measure import ACCURACY, MainMeasure, judged_by, lower_is_better
from pflmpi.learning.training import TrainingConfig
from pflmpi.outside import is_reference
from pflmpi.runtime.config import FREE_ON_RESUME
from pflmpi.sweep.table import Cell, SweepTable
from pflmpi.text import format_csv, pluralize, short_repr

LAST = 10  # rounds in a mean that does not choose a round by its accuracy on the test splits


@dataclass(frozen=True)
class Metric:
    """What a table shows of its runs.

    Attributes:
        name: in words.
        column: of metrics.csv.
        unit: in words; "" for a loss, and for a measure that is no share.
        scale: what a value of the column is multiplied by.
        judge: the column that decides which round is best; "": this one.
        lowest: whether that round is the one with the lowest value, though it is no loss.
        digits: decimals that are printed.
    """

    name: str
    column: str
    unit: str = "percent"
    scale: float = 100.0
    judge: str = ""
    lowest: bool = False
    digits: int = 2


METRICS = {
    "mean": Metric("accuracy, mean over clients", "accuracy_mean"),
    "weighted": Metric("accuracy, over all samples", "accuracy_weighted"),
    "spread": Metric("standard deviation of the accuracy over clients", "accuracy_std", judge="accuracy_mean"),
    "bottom": Metric("accuracy of the lowest 10 % of clients, mean", "accuracy_bottom"),
    "f1": Metric("macro F1, mean over clients", "f1_macro"),
    "unseen": Metric("accuracy of unseen clients, mean", "unseen_accuracy_mean"),
    "train_loss": Metric("training loss, mean over participants", "train_loss", "", 1.0),
    "test_loss": Metric("test loss, mean over clients", "test_loss", "", 1.0),
    "parameters": Metric(
        "values that all participants send in a round", "up_bytes", "thousands", 1 / 4000, lowest=True
    ),
}


_OVER = {
    "mean": "mean over clients",
    "weighted": "mean over clients by their samples",
    "bottom": "mean of the worst 10 % of clients",
}


def metric_of(name: str | None) -> Metric:
    """The metric of a table file, which may be a column of a measure (`evaluation.measures`); None: mean accuracy."""
    if metric := METRICS.get(name or "mean"):
        return metric
    base, _, over = str(name).rpartition("_")
    measure = MainMeasure(base)
    unit, digits = ("percent", 2) if measure.percent else ("", 4)
    return Metric(f"{measure.words}, {_OVER[over]}", str(name), unit, measure.scale, digits=digits)


def with_metric(table: SweepTable, cells: Sequence[Cell], out: Path) -> SweepTable:
    """The table; where it names no metric, with the main measure of its runs as that.

    Args:
        cells, out: as in `entries`.
    """
    if table.metric is not None:
        return table
    runs = []
    for cell in cells:
        with suppress(CheckpointError):  # as `entries` says
            if (run := open_run(cell.run(out))).columns["round"].size:
                runs.append(run)
    return table.model_copy(update={"metric": metric_name(main_measure(runs))})


def metric_name(measure: MainMeasure) -> str:
    """The metric of a table file that shows a measure."""
    return "mean" if measure == ACCURACY else measure.column


@dataclass(frozen=True)
class Value:
    """A value and its spread, None where it stands alone; accuracies are in percent."""

    value: float
    spread: float | None = None
    digits: int = 2


@dataclass(frozen=True)
class Entry:
    """The figures of a cell of the table, over its seeds.

    Attributes:
        ours: as the paper prints it, mean and sample standard deviation over the finished seeds.
        last_ten: the same of the mean over the last ten evaluated rounds, or over all of fewer.
        over_clients: standard deviation of the accuracy over clients in the last round, mean over seeds.
        published: the paper's figure.
        finished, seeds: how many runs are finished, of how many.
        done, rounds: rounds of all seeds together, of how many.
        state: in words, why seeds are missing; "" when none is.
        costs: until the target, of the finished seeds that reach it.
        partitions: the first twelve digits of the hashes of the finished runs' partitions, each once.
        problems: why runs cannot be shown, a line each.
        notes: what of the runs no checkpoint covers, and whether some seeds have no value.
        by_validation: whether validation samples choose the best round of a run.
    """

    row: str
    column: str
    ours: Value | None
    last_ten: Value | None
    over_clients: float | None
    published: Value | None
    finished: int
    seeds: int
    done: int
    rounds: int
    state: str
    costs: Sequence[CostTo] = ()
    partitions: Sequence[str] = ()
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    by_validation: bool = False

    @property
    def difference(self) -> float | None:
        return self.ours.value - self.published.value if self.ours and self.published else None


@dataclass(frozen=True)
class _SeedRun:
    """The run of one seed.

    Attributes:
        rounds: how many it is to have.
        run: None where there is none, or it cannot be read.
        done: rounds that it has.
        finished: whether it has all rounds, or has stopped early.
        other: why it is not the run of this cell and seed; "" if it is.
        problem: why it cannot be read.
    """

    rounds: int
    run: Run | None = None
    done: int = 0
    finished: bool = False
    other: str = ""
    problem: str = ""


def entries(table: SweepTable, cells: Sequence[Cell], out: Path) -> list[Entry]:
    """An entry for each row and column, in their order.

    Args:
        cells: of the table, seeds last.
        out: the folder of the sweep.
    """
    groups = groupby(cells, lambda cell: (cell.row, cell.column))
    return [
        _compute_entry(table, row, column, _mark_copies([_open_seed_run(cell, out) for cell in group]))
        for (row, column), group in groups
    ]


def pick(columns: Mapping[str, np.ndarray], metric: str | None, figure: str) -> float:
    """A figure of one run, of accuracies in percent.

    Args:
        columns: of its metrics, each [rounds].
        metric, figure: as in the table file.
    """
    shown = metric_of(metric)
    values = shown.scale * columns.get(shown.column, np.empty(0))
    measured = ~np.isnan(values)
    if not measured.any():  # no unseen clients, or none that can join; a run from before losses were recorded
        return math.nan
    if figure == "best20":
        latest = np.flatnonzero(measured)[-20:]
        return pick({name: column[latest] for name, column in columns.items()}, metric, "best")
    if figure == "best":
        judge = judged_by(shown.judge or shown.column, columns)
        judged = np.where(measured, columns[judge], math.nan)
        best = np.nanargmin if shown.lowest or lower_is_better(judge) else np.nanargmax
        return math.nan if np.isnan(judged).all() else float(values[best(judged)])
    return statistics.fmean(values[measured][-1 if figure == "last" else -LAST :])


def _open_seed_run(cell: Cell, out: Path) -> _SeedRun:
    training, folder = section("training", TrainingConfig, cell.raw.get("training")), cell.run(out)
    if not folder.exists():
        return _SeedRun(training.rounds)
    try:
        run = open_run(folder)
        lines = run.verified_metrics.lines
    except CheckpointError as error:
        return _SeedRun(training.rounds, problem=str(error))
    done = len(lines)
    other = _explain_mismatch(cell, out, run, done, training.rounds) if done else ""
    finished = not other and done > 0 and (done == training.rounds or EarlyStop(training.stop, lines).met)
    return _SeedRun(training.rounds, run, done, finished, other)


def _mark_copies(runs: Sequence[_SeedRun]) -> list[_SeedRun]:
    """The runs of a cell, those that are one and the same run as one before them marked as other runs."""
    seen: dict[str, Run] = {}
    result = []
    for seed in runs:
        if seed.run and not seed.other and (number := seed.run.recorded.get("run")):
            first = seen.setdefault(str(number), seed.run)
            if first is not seed.run:
                why = f"it is the same run as {first.path} (recorded.run)"
                seed = replace(seed, other=why, finished=False)
        result.append(seed)
    return result


def is_of(cell: Cell, out: Path) -> bool:
    """Whether the configuration that a sweep left beside the run of a cell has the cell's settings."""
    return cell.config(out).exists() and not _find_changes(yaml_file.read(cell.config(out)), cell.raw)


def _find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that no continuation of a run changes, by dotted key: those that differ, with both values.

    As in `sweep`, keys that one leaves out have their defaults. Code that `before` alone names is not loaded.
    """
    changes = differing(_list_fixed_settings(before), _list_fixed_settings(now))
    olds = [old for old, _ in changes.values()]
    if not olds or any(isinstance(old, list | dict) or is_reference(str(old)) for old in olds):
        return changes
    from pflmpi.config.load import parse  # here: it imports torch, which a table does without

    with suppress(ConfigError):
        return differing(*(_list_fixed_settings(parse(raw).resolved()) for raw in (before, now)))
    return changes


def _list_fixed_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that no continuation of a run changes, by dotted key."""
    return {key: value for key, value in by_key(raw).items() if key not in FREE_ON_RESUME}


def _explain_mismatch(cell: Cell, out: Path, run: Run, done: int, rounds: int) -> str:
    """Why a run is not that of a cell, by the configuration beside it and by its own; "" if it is.

    Args:
        done, rounds: that the run has, and is to have.
    """
    path = cell.config(out)
    if not path.exists():
        return f"{path} is missing; put it back from a copy"
    for key, (old, new) in _find_changes(yaml_file.read(path), cell.raw).items():
        how = "change the table back, or sweep into another --out"
        return f"{key} = {short_repr(old)} in {path}, {short_repr(new)} in the table; {how}"
    if change := find_different_option(run.config, cell.raw):
        return f"{change} in the table"
    return f"it has {done} rounds, and {rounds} in the table" if done > rounds else ""


def find_different_option(config: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    """The first option in which a run's configuration is not what a configuration for it says; "" if none is.

    Keys that it does not name count with their defaults, but for those of the algorithm, model and partition, whose
    classes reading does not import.

    >>> find_different_option({"training": {"lr": 0.1}}, {"training": {"lr": 0.2}})
    'training.lr = 0.1 in the run, 0.2'
    """
    model = raw.get("model")
    raw = {**raw, "model": model[0]} if isinstance(model, list) and len(model) == 1 else raw
    values, given = select_decisive_options(config), select_decisive_options(raw)
    for key, value in given.items():
        if not (key in FREE_ON_RESUME or value in _LEFT_TO_THE_RUN.get(key, ()) or _matches(value, values.get(key))):
            return f"{key} = {short_repr(values.get(key))} in the run, {short_repr(value)}"
    return ""


_LEFT_TO_THE_RUN: dict[str, tuple[Any, ...]] = {
    "data.name": ("",),
    "data.split": ("auto",),
    "evaluation.measures": (None, []),
}


def _matches(given: Any, value: Any) -> bool:
    """Whether a value is the given one, which may leave keys out; files that were moved are the same by their names."""
    if isinstance(given, Mapping):
        return isinstance(value, Mapping) and all(_matches(part, value.get(key)) for key, part in given.items())
    if isinstance(given, list | tuple) and isinstance(value, list | tuple):
        return len(given) == len(value) and all(map(_matches, given, value))
    if isinstance(given, str) and isinstance(value, str):
        return Path(given).name == Path(value).name
    return bool(given == value)


def _compute_entry(table: SweepTable, row: str, column: str, runs: Sequence[_SeedRun]) -> Entry:
    finished = [seed.run.columns for seed in runs if seed.run and seed.finished]
    hashes = [str(seed.run.recorded.get("partition", "")) for seed in runs if seed.run and seed.finished]
    printed, digits = table.published.get(row, {}).get(column), metric_of(table.metric).digits
    spread = compute_mean_and_std([pick(columns, "spread", "last") for columns in finished])
    figures = [pick(columns, table.metric, table.figure) for columns in finished]
    notes = [f"{seed.run.path}: {note}" for seed in runs if seed.run and seed.done for note in seed.run.text_notes]
    notes += [f"{seed.run.path} is left out: {seed.other}" for seed in runs if seed.run and seed.other]
    codes = [seed.run.recorded.get("code", {}) for seed in runs if seed.run and seed.finished]
    if changed := {key for code in codes for key in differing(codes[0], code)}:
        notes.append(f"{row}, {column}: the code of {', '.join(sorted(changed))} is not the same in all seeds")
    if 0 < (lacking := sum(map(math.isnan, figures))) < len(figures):
        of = f"{len(figures) - lacking} of {pluralize(len(figures), 'seed')}"
        notes.append(f"{row}, {column}: the mean is of {of}; of the others the metric has no value")
    return Entry(
        row,
        column,
        ours=compute_mean_and_std(figures, digits),
        last_ten=compute_mean_and_std([pick(columns, table.metric, "last10") for columns in finished], digits),
        over_clients=spread.value if spread else None,
        published=Value(printed[0], printed[1] if len(printed) > 1 else None) if printed else None,
        finished=len(finished),
        seeds=len(runs),
        done=sum(seed.done for seed in runs if not seed.other),
        rounds=sum(seed.rounds for seed in runs),
        state=_describe_state(runs),
        costs=[cost for columns in finished if table.target and (cost := compute_cost_to(columns, table.target))],
        partitions=[*dict.fromkeys(text[:12] for text in hashes if text)],
        problems=[seed.problem for seed in runs if seed.problem],
        notes=notes,
        by_validation=any("validation_accuracy_mean" in columns for columns in finished),
    )


def compute_mean_and_std(figures: Sequence[float], digits: int = 2) -> Value | None:
    """Mean and sample standard deviation of what is known; None where nothing is."""
    values = [value for value in figures if not math.isnan(value)]
    if not values:
        return None
    return Value(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, digits)


def _describe_state(runs: Sequence[_SeedRun]) -> str:
    finished = sum(run.finished for run in runs)
    if finished == len(runs):
        return ""
    parts = [f"{finished} of {len(runs)} seeds"] if finished else []
    if damaged := sum(bool(run.problem) for run in runs):
        parts.append(f"{damaged} damaged")
    if any(run.other for run in runs):
        parts.append("other configuration")
    elif not finished and not damaged:
        done = sum(run.done for run in runs)
        parts.append(f"{done}/{sum(run.rounds for run in runs)} rounds" if done else "missing")
    return ", ".join(parts)


_MEAN = f"mean of the last {LAST} evaluated rounds, or of all of fewer"
_FIGURES = {"best": "best round", "best20": "best of the last 20 rounds", "last": "last round", "last10": _MEAN}
_COSTS = ("rounds", "megabytes up and down")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


@dataclass(frozen=True)
class PrintedTable:
    """A table of texts, ready to be printed.

    Attributes:
        rows: the name of each and its texts.
    """

    caption: str
    columns: list[str]
    rows: list[list[str]]


def printed(table: SweepTable, filled: Sequence[Entry]) -> list[PrintedTable]:
    """The table as the paper prints it, beside the published figures, and the mean of the last ten rounds."""
    metric = metric_of(table.metric)
    unit, points = metric.unit and f", {metric.unit}", metric.unit == "percent"
    fit = "; inside the published spread, within a point, or outside" if points else ""
    figure = _FIGURES[table.figure]
    if table.figure.startswith("best") and any(entry.by_validation for entry in filled):
        figure += " by validation"
    beside = f" (published, difference{fit})" if any(entry.published for entry in filled) else ""
    first = f"{metric.name}, {figure}{beside}{unit}"
    texts = {
        first: [_format_entry(entry, points) for entry in filled],
        f"{metric.name}, {_FIGURES['last10']}{unit}": [_join_value(entry.last_ten, entry.state) for entry in filled],
    }
    if table.target is not None:
        for name in _COSTS:
            caption = f"{name} to an accuracy of {100 * table.target:g} %, of the seeds that reach it"
            texts[caption] = [_join_value(_average_costs(entry)[name]) or "-" for entry in filled]
    rows = [row for row in table.rows if any(entry.row == row for entry in filled)]
    columns = [column for column in table.columns if any(entry.column == column for entry in filled)]
    names = [(entry.row, entry.column) for entry in filled]
    tables = []
    for caption, of_entries in texts.items():
        cells = dict(zip(names, of_entries, strict=True))
        lines = [[row, *(cells.get((row, column), "-") for column in columns)] for row in rows]
        tables.append(PrintedTable(caption, columns, lines))
    return tables


def partitions(filled: Sequence[Entry]) -> list[str]:
    """A line for each column with finished runs: the hashes of their partitions."""
    by_column: dict[str, dict[str, None]] = {}
    for entry in filled:
        by_column.setdefault(entry.column, {}).update(dict.fromkeys(entry.partitions))
    return [f"partition of {column}: {', '.join(hashes)}" for column, hashes in by_column.items() if hashes]


def notes(table: SweepTable, filled: Sequence[Entry]) -> list[str]:
    """The notes of the table file, and what is to be said of runs."""
    return [*table.notes, *(note for entry in filled for note in entry.notes)]


def markdown(table: SweepTable, filled: Sequence[Entry], commands: Sequence[str]) -> str:
    """The table with its source, notes and the commands that made it."""
    parts = [f"# {table.title}", f"Published figures: {table.source}.", "```\n" + "\n".join(commands) + "\n```"]
    for matrix in printed(table, filled):
        rows = [["", *matrix.columns], ["---"] * (1 + len(matrix.columns)), *matrix.rows]
        lines = ["| " + " | ".join(text.replace("|", r"\|") for text in row) + " |" for row in rows]
        parts += [f"{matrix.caption}:", "\n".join(lines)]
    if lines := [*partitions(filled), *notes(table, filled)]:
        parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def comma_separated(table: SweepTable, filled: Sequence[Entry]) -> str:
    """All values as CSV, one line for each row and column of the table."""
    lines = [_build_csv_row(table, entry) for entry in filled]
    return format_csv([list(lines[0]), *(list(line.values()) for line in lines)])


def latex(table: SweepTable, filled: Sequence[Entry], commands: Sequence[str]) -> str:
    """The table as tabulars for the package booktabs."""
    head = (table.title, table.source, *commands, *notes(table, filled))
    parts = [f"% {line}" for text in head for line in text.splitlines()]
    for matrix in printed(table, filled):
        parts += ["", f"% {matrix.caption}", *format_tabular(["", *matrix.columns], matrix.rows)]
    return "\n".join(parts) + "\n"


def format_tabular(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a LaTeX tabular for the package booktabs; the first column holds names."""
    head, *body = (" & ".join(_escape_latex(text) for text in row) + r" \\" for row in [columns, *rows])
    start = [rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}", r"\toprule", head, r"\midrule"]
    return [*start, *body, r"\bottomrule", r"\end{tabular}"]


def rate_difference(difference: float, spread: float | None) -> str:
    """How close a figure in percent is to the published one, to two decimals.

    Args:
        spread: published, around the figure; None where there is none.

    >>> rate_difference(-0.14, 0.15), rate_difference(-0.14, None), rate_difference(1.24, 0.2)
    ('inside', 'within a point', 'outside')
    """
    if spread is not None and round(abs(difference), 2) <= spread:
        return "inside"
    return "within a point" if round(abs(difference), 2) <= 1 else "outside"


def _build_csv_row(table: SweepTable, entry: Entry) -> dict[str, str | int]:
    def pair(name: str, second: str, value: Value | None) -> dict[str, str]:
        return dict(zip((name, second), _format_value(value), strict=True))

    costs = {f"{name} to target": _format_value(cost)[0] for name, cost in _average_costs(entry).items()}
    return {
        "row": entry.row,
        "column": entry.column,
        "metric": table.metric or "mean",
        "figure": table.figure + (" by validation" if entry.by_validation else ""),
        **pair("ours", "ours_std", entry.ours),
        **pair("published", "published_spread", entry.published),
        "difference": _format_number(entry.difference, entry.ours.digits if entry.ours else 2),
        "fit": _rate_entry(entry) if metric_of(table.metric).unit == "percent" else "",
        **pair(f"last{LAST}", f"last{LAST}_std", entry.last_ten),
        "std_over_clients": _format_number(entry.over_clients),
        **({} if table.target is None else {**costs, "seeds_at_target": len(entry.costs)}),
        "seeds_finished": entry.finished,
        "seeds": entry.seeds,
        "rounds_done": entry.done,
        "rounds": entry.rounds,
        "state": entry.state or "done",
        "partitions": " ".join(entry.partitions),
    }


def _rate_entry(entry: Entry) -> str:
    if entry.published is None or entry.difference is None:
        return ""
    return rate_difference(entry.difference, entry.published.spread)


def _format_entry(entry: Entry, points: bool) -> str:
    """Our figure and the seeds behind it; in brackets the published one, the difference, and how near that is.

    >>> figures = dict(last_ten=None, over_clients=None, finished=3, seeds=3, done=30, rounds=30, state="")
    >>> _format_entry(Entry("row", "column", ours=Value(98.634, 0.1), published=Value(98.66), **figures), points=True)
    '98.63 ± 0.10, 3 seeds (98.66, -0.03, within a point)'
    """
    seeds = "" if entry.state or entry.ours is None else pluralize(entry.finished, "seed")
    ours = _join_value(entry.ours, entry.state, seeds)
    if entry.published is None:
        return ours
    difference = "" if entry.difference is None or entry.ours is None else f"{entry.difference:+z.{entry.ours.digits}f}"
    return f"{ours} ({_join_value(entry.published, difference, _rate_entry(entry) if points else '')})"


def _join_value(value: Value | None, *more: str) -> str:
    """A value with its spread, and further texts."""
    return ", ".join(filter(None, (" ± ".join(filter(None, _format_value(value))), *more)))


def _format_value(value: Value | None) -> tuple[str, str]:
    """A value and its spread."""
    return (
        ("", "")
        if value is None
        else (_format_number(value.value, value.digits), _format_number(value.spread, value.digits))
    )


def _average_costs(entry: Entry) -> dict[str, Value | None]:
    """Over the seeds that reach the target, by the names of `_COSTS`."""
    rounds = [float(cost.rounds) for cost in entry.costs]
    megabytes = [(cost.up_bytes + cost.down_bytes) / 1e6 for cost in entry.costs]
    return dict(zip(_COSTS, map(compute_mean_and_std, (rounds, megabytes)), strict=True))


def _format_number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:z.{digits}f}"


def _escape_latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)
