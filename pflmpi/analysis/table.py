"""The values of a sweep's table: those of its runs, beside published ones."""

import json
import math
import os
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.analysis.comparable import choose_main_measure
from pflmpi.analysis.metrics import CostTo, compute_cost_to, compute_deviation, compute_mean
from pflmpi.analysis.run import Run, read_run
from pflmpi.config import yaml_file
from pflmpi.config.sections import by_key, find_differences, section
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.learning.early_stop import EarlyStop
from pflmpi.learning.main_measure import ACCURACY, MainMeasure, choose_judging_column, lower_is_better
from pflmpi.learning.training import TrainingConfig
from pflmpi.outside import is_reference
from pflmpi.runtime.config import DATA_PATHS, FREE_ON_RESUME
from pflmpi.sweep.table import Cell, SweepTable
from pflmpi.text import pluralize, short_repr

LAST = 10  # rounds of the mean that selects no round by its test accuracy


@dataclass(frozen=True)
class Metric:
    """A metric that a table shows."""

    name: str  # description for readers
    column: str  # its column of metrics.csv
    unit: str = "percent"  # name of the unit; "" for losses and measures that are no shares
    scale: float = 100.0  # factor from the column to the printed value
    judge: str = ""  # the column that decides which round is best; "" for `column`
    lowest: bool = False  # whether the lowest value is the best, although the metric is no loss
    digits: int = 2  # printed decimals


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


_AGGREGATES = {  # suffix of a column -> description
    "mean": "mean over clients",
    "weighted": "mean over clients by their samples",
    "bottom": "mean of the worst 10 % of clients",
}


def metric_of(name: str | None) -> Metric:
    """The metric that a table file names: one of `METRICS`, or a column of `evaluation.measures`; None: accuracy."""
    if metric := METRICS.get(name or "mean"):
        return metric
    base, _, aggregate = str(name).rpartition("_")
    measure = MainMeasure(base)
    unit, digits = ("percent", 2) if measure.percent else ("", 4)
    return Metric(f"{measure.words}, {_AGGREGATES[aggregate]}", str(name), unit, measure.scale, digits=digits)


def fill_in_metric(table: SweepTable, cells: Sequence[Cell], out: Path) -> SweepTable:
    """The table with a metric: the main measure of its runs, if the table file names none.

    Args:
        cells: see `compute_entries`.
    """
    if table.metric is not None:
        return table
    runs = []
    for cell in cells:
        with suppress(CheckpointError):  # `compute_entries` reports it
            if (run := read_run(cell.run(out))).columns["round"].size:
                runs.append(run)
    return table.model_copy(update={"metric": metric_name(choose_main_measure(runs))})


def metric_name(measure: MainMeasure) -> str:
    """The name that a table file has for a measure."""
    return "mean" if measure == ACCURACY else measure.column


@dataclass(frozen=True)
class Value:
    """A value with its spread, None if there is none; accuracies are in percent."""

    value: float
    spread: float | None = None
    digits: int = 2


@dataclass(frozen=True)
class Entry:
    """A cell of the table, over its seeds.

    Attributes:
        ours: mean and sample standard deviation over the finished seeds of the value that the table asks for.
        last_ten: the same for the mean over the last ten evaluated rounds, or over all if there are fewer.
        over_clients: standard deviation of the accuracy over clients in the last round, mean over seeds.
        published: the paper's value.
        finished, seeds: number of finished runs, and of all.
        done, rounds: completed rounds of all seeds together, and planned ones.
        state: why seeds are missing; "" if none is.
        costs: cost to the target for each finished seed that reaches it.
        partitions: distinct hashes of the finished runs' partitions, their first twelve digits.
        problems: why runs cannot be read, one line each.
        notes: warnings about the runs, one line each.
        by_validation: whether validation samples choose the best round of a run.
        values: of the finished runs, in the order of the seeds.
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
    values: Sequence[float] = ()

    @property
    def difference(self) -> float | None:
        """Our value minus the published one; None if either is missing."""
        return self.ours.value - self.published.value if self.ours and self.published else None


@dataclass(frozen=True)
class _SeedRun:
    """The run of one seed; `run` is None if it does not exist or cannot be read."""

    rounds: int  # planned
    run: Run | None = None
    done: int = 0  # completed rounds
    finished: bool = False  # whether it has all rounds, or has stopped early
    mismatch: str = ""  # why it is not the run of this cell and seed
    problem: str = ""  # why it cannot be read


def compute_entries(table: SweepTable, cells: Sequence[Cell], out: Path) -> list[Entry]:
    """An entry for each row and column of the table, in order.

    Args:
        cells: with seeds varying fastest.
    """
    groups = groupby(cells, lambda cell: (cell.row, cell.column))
    seeds = {key: [_open_seed_run(cell, out) for cell in group] for key, group in groups}
    notes = _list_data_notes(cells, [seed for of_cell in seeds.values() for seed in of_cell])
    entries = [_compute_entry(table, *key, of_cell) for key, of_cell in seeds.items()]
    return [replace(entry, notes=[*entry.notes, *notes.get((entry.row, entry.column), ())]) for entry in entries]


def pick_value(columns: Mapping[str, np.ndarray], metric: str | None, figure: str) -> float:
    """The value of one run that a table shows; accuracies are in percent, NaN if the run has no value.

    Args:
        columns: columns of its metrics, each [rounds].
        metric, figure: as in the table file.
    """
    shown = metric_of(metric)
    values = shown.scale * columns.get(shown.column, np.empty(0))
    evaluated = ~np.isnan(values)
    if not evaluated.any():
        return math.nan
    if figure == "best20":
        latest = np.flatnonzero(evaluated)[-20:]
        return pick_value({name: column[latest] for name, column in columns.items()}, metric, "best")
    if figure == "best":
        judge = _choose_judge(metric, columns)
        scores = np.where(evaluated, columns[judge], math.nan)
        if np.isnan(scores).all():
            return math.nan
        best = np.nanargmin(scores) if shown.lowest or lower_is_better(judge) else np.nanargmax(scores)
        return float(values[best])
    return float(compute_mean(values[evaluated][-1 if figure == "last" else -LAST :]))


def _choose_judge(metric: str | None, columns: Container[str]) -> str:
    """The column that decides which round of a run is best."""
    shown = metric_of(metric)
    return choose_judging_column(shown.judge or shown.column, columns)


def _open_seed_run(cell: Cell, out: Path) -> _SeedRun:
    training, folder = section("training", TrainingConfig, cell.raw.get("training")), cell.run(out)
    if not folder.exists():
        return _SeedRun(training.rounds)
    try:
        run = read_run(folder)
        lines = run.verified_metrics.lines
    except CheckpointError as error:
        return _SeedRun(training.rounds, problem=str(error))
    done, last = len(lines), EarlyStop(training.stop, lines).last_round(training.rounds)
    mismatch = _explain_mismatch(cell, out, done, last) if done else ""
    finished = not mismatch and done == last
    return _SeedRun(training.rounds, run, done, finished, mismatch)


def find_changes(cell: Cell, out: Path) -> dict[str, tuple[Any, Any]]:
    """The settings of a cell that have changed since a sweep wrote the configuration beside its run.

    Settings that a resumed run may change, and defaults that are written or left out, make no difference, as in
    `sweep`. Code that only the earlier configuration names is not loaded.

    Returns:
        By dotted key, the values before and now.
    """
    path = cell.config(out)
    before, now = yaml_file.read(path) if path.exists() else {}, cell.raw
    files = {key: (by_key(before).get(key), by_key(now).get(key)) for key in DATA_PATHS}
    if changes := {key: paths for key, paths in files.items() if _are_other_files(*paths)}:
        return changes
    changes = find_differences(_list_fixed_settings(before), _list_fixed_settings(now))
    olds = [old for old, _ in changes.values()]
    if not olds or any(isinstance(old, list | dict) or is_reference(str(old)) for old in olds):
        return changes
    from pflmpi.config.load import parse  # imports torch, which most tables do not need

    with suppress(ConfigError):
        return find_differences(*(_list_fixed_settings(parse(raw).resolved()) for raw in (before, now)))
    return changes


def _are_other_files(old: Any, new: Any) -> bool:
    """Whether two paths name files of other names, or two files that are both there; `sweep` compares their content."""
    if old == new or not isinstance(old, str) or not isinstance(new, str):
        return False
    both = os.path.exists(old) and os.path.exists(new)
    return Path(old).name != Path(new).name or (both and not os.path.samefile(old, new))


def _list_fixed_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in by_key(raw).items() if key not in FREE_ON_RESUME}


def _explain_mismatch(cell: Cell, out: Path, done: int, last: int) -> str:
    """Why the run in the folder of a cell is not that of the cell; "" if it is.

    Args:
        done, last: completed rounds, and the one after which the run ends, also by `training.stop`.
    """
    path = cell.config(out)
    if not path.exists():
        return f"{path} is missing; put it back from a copy"
    for key, (old, new) in find_changes(cell, out).items():
        remedy = "sweep again, which compares their content" if key in DATA_PATHS else "sweep into another --out"
        values = f"{key} = {short_repr(old)} in {path}, {short_repr(new)} in the table"
        return f"{values}; change the table back, or {remedy}"
    return f"it has {done} rounds, and ends after {last} in the table" if done > last else ""


def _compute_entry(table: SweepTable, row: str, column: str, seeds: Sequence[_SeedRun]) -> Entry:
    runs = [seed.run for seed in seeds if seed.run and seed.finished]
    values = [pick_value(run.columns, table.metric, table.figure) for run in runs]
    last_ten = [pick_value(run.columns, table.metric, "last10") for run in runs]
    spread = compute_mean_and_std([pick_value(run.columns, "spread", "last") for run in runs])
    published, digits = table.published.get(row, {}).get(column), metric_of(table.metric).digits
    hashes = [str(run.recorded.get("partition", ""))[:12] for run in runs]
    return Entry(
        row,
        column,
        ours=compute_mean_and_std(values, digits),
        last_ten=compute_mean_and_std(last_ten, digits),
        over_clients=spread.value if spread else None,
        published=Value(published[0], published[1] if len(published) > 1 else None) if published else None,
        finished=len(runs),
        seeds=len(seeds),
        done=sum(seed.done for seed in seeds if not seed.mismatch),
        rounds=sum(seed.rounds for seed in seeds),
        state=_describe_state(seeds),
        costs=[cost for run in runs if table.target and (cost := compute_cost_to(run.columns, table.target))],
        partitions=[*dict.fromkeys(filter(None, hashes))],
        problems=[seed.problem for seed in seeds if seed.problem],
        notes=[*_list_run_notes(seeds), *(f"{row}, {column}: {note}" for note in _list_seed_notes(runs, values))],
        by_validation=any(_choose_judge(table.metric, run.columns).startswith("validation_") for run in runs),
        values=values,
    )


def _list_run_notes(seeds: Sequence[_SeedRun]) -> list[str]:
    """What no checkpoint confirms of the runs, and which runs are left out and why."""
    notes = [f"{seed.run.path}: {note}" for seed in seeds if seed.run and seed.done for note in seed.run.text_notes]
    return notes + [f"{seed.run.path} is left out: {seed.mismatch}" for seed in seeds if seed.run and seed.mismatch]


def _list_seed_notes(runs: Sequence[Run], values: Sequence[float]) -> list[str]:
    """In what the finished seeds of a cell are unlike: their code, and whether they have a value."""
    notes = []
    codes = [run.recorded.get("code", {}) for run in runs]
    if changed := {key for code in codes for key in find_differences(codes[0], code)}:
        notes.append(f"the code of {', '.join(sorted(changed))} is not the same in all seeds")
    missing = sum(map(math.isnan, values))
    if 0 < missing < len(values):
        of = f"{len(values) - missing} of {pluralize(len(values), 'seed')}"
        notes.append(f"the mean is of {of}; of the others the metric has no value")
    return notes


def _list_data_notes(cells: Sequence[Cell], seeds: Sequence[_SeedRun]) -> dict[tuple[str, str], list[str]]:
    """By row and column, which finished runs have other data than the first one with the same `data` section."""
    firsts: dict[str, Run] = {}
    notes: dict[tuple[str, str], list[str]] = {}
    for cell, seed in zip(cells, seeds, strict=True):
        data = cell.raw.get("data")
        if seed.run is None or not seed.finished or "data" not in seed.run.recorded:
            continue
        limited = isinstance(data, Mapping) and data.get("limit") is not None  # the seed chooses the samples then
        first = firsts.setdefault(json.dumps([data, cell.seed if limited else None], default=str), seed.run)
        if seed.run.recorded["data"] != first.recorded["data"]:
            note = f"{cell.row}, {cell.column}: {seed.run.path} has other data than {first.path} (recorded.data)"
            notes.setdefault((cell.row, cell.column), []).append(note)
    return notes


def compute_mean_and_std(values: Sequence[float], digits: int = 2) -> Value | None:
    """Mean and sample standard deviation of the values that are not NaN; None without a mean, that is if all are."""
    known = [value for value in values if not math.isnan(value)]
    if not known or math.isnan(mean := compute_mean(known)):
        return None
    deviation = compute_deviation(known)
    return Value(mean, None if math.isnan(deviation) else deviation, digits)


def _describe_state(seeds: Sequence[_SeedRun]) -> str:
    """Why seeds of a cell are missing; "" if all are finished."""
    finished = sum(seed.finished for seed in seeds)
    if finished == len(seeds):
        return ""
    parts = [f"{finished} of {len(seeds)} seeds"] if finished else []
    if damaged := sum(bool(seed.problem) for seed in seeds):
        parts.append(f"{damaged} damaged")
    if any(seed.mismatch for seed in seeds):
        parts.append("other configuration")
    elif not finished and not damaged:
        done = sum(seed.done for seed in seeds)
        parts.append(f"{done}/{sum(seed.rounds for seed in seeds)} rounds" if done else "missing")
    return ", ".join(parts)
