"""The summary table of runs: the main measure, losses, cost, cost to a target, gain over local training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pflmpi.analysis.comparable import choose_main_measure, group_by_seed, list_compared_options
from pflmpi.analysis.metrics import compute_cost_to, compute_deviation, compute_mean, find_best_round
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun
from pflmpi.analysis.series.clients import compute_gains_over_local
from pflmpi.learning.main_measure import ACCURACY, MainMeasure, to_validation_name
from pflmpi.text import scaled_bytes

Value = str | int | float


@dataclass(frozen=True)
class Column:
    """A column of the table of runs."""

    title: str  # its name, which is unique
    key: str = ""  # its name in programs: for the results of a run that of the value, as in the JSON of `compare`
    digits: int = 2  # printed decimals
    scale: float = 1.0  # factor from the value in JSON to that in the table
    better: str = ""  # which of its values are marked on a page, "higher" or "lower" ones; "" for none
    is_optional: bool = False  # whether it is left out if no run has a value
    is_on_page: bool = True  # whether a page has it, besides runs.csv
    in_bytes: str = ""  # of a column of bytes, its title in tables without the unit, which is one that suits all runs
    is_deviation: bool = False  # whether it has the standard deviations over seeds of the column with the same key

    @property
    def deviation(self) -> "Column":
        """The column of its standard deviations over seeds."""
        return replace(self, title=f"{self.title} ±", is_deviation=True)


RUN, SEEDS, FOLDER = map(Column, ("run", "seeds", "folder"))
ROUNDS = Column("rounds", "rounds")
Line = dict[Column, Value]  # unknown numbers are NaN or ""

_SHARE_OF_BEST = 0.9  # the second default target, as a share of the best accuracy of all runs


def describe_columns(measure: MainMeasure) -> str:
    """Explains the columns of a table of runs with this main measure, for readers."""
    name = measure.words
    worst, sense = ("highest", "below") if measure.lower else ("lowest", "above")
    return (
        f"Best and last: {name}, mean over clients, on test samples; of a run with validation samples the best round "
        f"is the one that these choose, and validation is their {name} in it; worst client and {worst} 10 %: at the "
        "end; unseen: clients that were kept out of training; after training: the participants before the server "
        f"answers; gain over local: how far the {name} at the end is {sense} that of the client in local training; "
        "bytes: what the messages of all rounds hold; rounds, time and sent to an accuracy: until the first round "
        "whose mean is as high. More in docs/analysis.md."
    )


def summarize_runs(runs: Sequence[NamedRun], targets: Sequence[float] = ()) -> list[Line]:
    """A line for each run.

    Args:
        targets: accuracies, as shares, to which costs are counted.
    """
    plain_runs = [named_run.run for named_run in runs]
    gains = {named_run: gain for named_run, _, gain in compute_gains_over_local(runs)[1]}
    measure = choose_main_measure(plain_runs)
    results = [summarize_run(run, measure) for run in plain_runs]
    titles = {column.title for line in results for column in (RUN, SEEDS, FOLDER, *line)}
    options = list_compared_options(plain_runs, titles)
    title = "gain over local" if measure == ACCURACY else f"gain over local ({_unit(measure)})"
    gain_column = Column(title, "gain", _digits(measure), better="higher", is_optional=True)
    losers_column = Column("clients below local", better="lower", is_optional=True)
    lines: list[Line] = []
    for index, named_run in enumerate(runs):
        run, gain = named_run.run, gains.get(named_run, np.array(np.nan))
        has_gain = not np.isnan(gain).all()
        line: Line = {RUN: named_run.label, FOLDER: str(run.path)}
        line |= {Column(name): texts[index] for name, texts in options.items()}
        line |= results[index]
        with np.errstate(invalid="ignore"):  # infinities of both signs have no mean
            line[gain_column] = float(np.nanmean(gain)) if has_gain else math.nan
        line[losers_column] = int((gain < 0).sum()) if has_gain else ""
        for target in targets:
            cost, to = compute_cost_to(run.columns, target), f"to {100 * target:g} %"
            line[Column(f"rounds {to}", "rounds_to", better="lower")] = "" if cost is None else cost.rounds
            line[Column(f"time {to} (s)", better="lower")] = math.nan if cost is None else cost.seconds
            sent = Column(f"bytes {to}", "bytes_to", better="lower", in_bytes=f"sent {to}")
            line[sent] = "" if cost is None else cost.up_bytes + cost.down_bytes
        lines.append(line)
    optional = [column for column in lines[0] if column.is_optional]
    empty = [column for column in optional if all(str(line[column]) in ("", "nan") for line in lines)]
    return [{column: value for column, value in line.items() if column not in empty} for line in lines]


def by_title(line: Line) -> dict[str, Value]:
    """A line by the titles of its columns."""
    return {column.title: value for column, value in line.items()}


def average_seeds(runs: Sequence[NamedRun], lines: Sequence[Line]) -> list[Line]:
    """A line for each group of runs that differ only in the seed, with means and standard deviations.

    Args:
        lines: the lines of the runs; returned unchanged if no two runs differ only in the seed.
    """
    groups, line_of = group_by_seed(runs), dict(zip(runs, lines, strict=True))
    if len(groups) == len(runs):
        return list(lines)
    merged: list[Line] = []
    for group in groups:
        line: Line = {RUN: group.label, SEEDS: len(group.runs)}
        for column in lines[0]:
            values = [line_of[named_run][column] for named_run in group.runs]
            if column == FOLDER:
                line[column] = str(group.folder) if len(values) > 1 else values[0]
            elif column != RUN:
                line |= _average_column(column, values)
        merged.append(line)
    return merged


def _average_column(column: Column, values: Sequence[Value]) -> Line:
    """The mean of a column over seeds, empty if a value is missing; for floats also the standard deviation."""
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return {column: "" if numbers else ", ".join(dict.fromkeys(map(str, values)))}
    mean: Line = {column: values[0] if len({*numbers}) == 1 else compute_mean(numbers)}
    if isinstance(values[0], float):
        mean[column.deviation] = compute_deviation(numbers)
    return mean


def summarize_run(run: Run, measure: MainMeasure = ACCURACY) -> Line:
    """The results of a run by column, those of `measure` first.

    Raises:
        CheckpointError: its metrics are damaged.
    """
    columns, seconds = run.columns, run.columns["seconds"]
    last = _read_last_evaluation(run, measure)
    per_round = float(seconds.mean()) if len(seconds) else math.nan

    def measured(title: str, key: str, scale: float = 1.0, **about: Any) -> Line:
        return {Column(title, key, scale=scale, **about): scale * last.get(key, math.nan)}

    def sent(title: str, key: str, **about: Any) -> Line:
        return {Column(f"{title} (bytes)", key, in_bytes=title, **about): _sum_bytes(columns[key])}

    share: dict[str, Any] = {"scale": 100, "better": "higher", "is_optional": True}
    return {
        ROUNDS: len(seconds),
        Column("of", "planned_rounds"): int(run.config.get("training", {}).get("rounds", 0)),
        **_summarize_main_measure(run, measure, last),
        **({} if measure == ACCURACY else measured("accuracy (%)", "accuracy_mean", **share)),
        **measured("macro F1 (%)", "f1_macro", **share),
        **measured("training loss", "train_loss", digits=4, is_on_page=False),
        **measured("test loss", "test_loss", digits=4, is_on_page=False),
        **sent("up", "up_bytes"),
        **sent("down", "down_bytes"),
        **sent("up, wire", "wire_up_bytes", is_on_page=False),
        **sent("down, wire", "wire_down_bytes", is_on_page=False),
        Column("time (s)", "seconds"): float(seconds.sum()),
        Column("time per round (s)", "seconds_per_round", digits=4, is_on_page=False): per_round,
    }


def _read_last_evaluation(run: Run, measure: MainMeasure) -> dict[str, float]:
    """The values of the last round with an evaluation by column, of the last round if none has one; {} without rounds.

    A column without a value in that round is NaN, not what it was in an older one.
    """
    main = measure if run.has(measure) else run.main_measure
    index = int(np.flatnonzero(~np.isnan(run.columns[main.column]))[-1]) if run.has(main) else -1
    return {name: float(values[index]) for name, values in run.columns.items() if len(values)}


def _sum_bytes(values: np.ndarray) -> Value:
    """The sum of a column of bytes; "" if metrics of rounds are lost."""
    return "" if np.isnan(values).any() else int(values.sum())


def _summarize_main_measure(run: Run, measure: MainMeasure, last: Mapping[str, float]) -> Line:
    """The results by the main measure.

    Args:
        last: from `_read_last_evaluation`.
    """
    columns = run.columns
    best = validation = std = worst = math.nan
    best_round: Value = ""
    if run.has(measure) and (index := find_best_round(columns, measure=measure)) is not None:
        best = float(columns[measure.column][index])
        if (validation_column := to_validation_name(measure.column)) in columns:
            validation = float(columns[validation_column][index])
        best_round = int(columns["round"][index])
    clients = run.final(measure)
    if clients is not None:
        with np.errstate(invalid="ignore"):  # the deviation of infinite values is NaN
            std = float(np.nanstd(clients))
        worst = float(np.nanmax(clients) if measure.lower else np.nanmin(clients))
    name, better = measure.name, "lower" if measure.lower else "higher"

    def main(title: str, key: str, value: float | None = None, better: str = better, **about: Any) -> Line:
        column = Column(f"{title} ({_unit(measure)})", key, _digits(measure), measure.scale, better, **about)
        return {column: measure.scale * (last.get(key, math.nan) if value is None else value)}

    return {
        **main("best", f"best_{name}", best),
        Column("in round", "best_round"): best_round,
        **main("validation", f"best_validation_{name}", validation, better="", is_optional=True),
        **main("last", measure.column),
        **main("std over clients", f"{name}_std", None if measure == ACCURACY else std, better="", is_on_page=False),
        **main("worst client", f"{name}_worst_client", worst),
        **main(f"{'highest' if measure.lower else 'lowest'} 10 %", f"{name}_bottom", is_optional=True),
        **main("unseen", f"unseen_{measure.column}", is_optional=True),
        **main("after training", f"trained_{measure.column}", is_optional=True),
    }


def _unit(measure: MainMeasure) -> str:
    """What columns of the main measure have in brackets."""
    if measure == ACCURACY:
        return "%"
    return f"{measure.words}, %" if measure.percent else measure.words


def _digits(measure: MainMeasure) -> int:
    return 2 if measure.percent else 4


def format_line(line: Line) -> dict[str, str]:
    """The values of a line as texts by the titles of their columns; unknown ones are empty."""
    return {column.title: _format_value(column, value) for column, value in line.items()}


def _format_value(column: Column, value: Value) -> str:
    if not isinstance(value, float):
        return str(value)
    return "" if math.isnan(value) else f"{value:.{column.digits}f}"


def format_lines(lines: Sequence[Line]) -> list[dict[Column, str]]:
    """Formats lines with bytes in a common unit, named in the title, and means with their deviations in one cell."""
    rows: list[dict[Column, str]] = [{} for _ in lines]
    for column in lines[0]:
        if column.is_deviation:
            continue
        shown, values = column, [line[column] for line in lines]
        if column.in_bytes:
            shown, values = _scale_bytes(column, values)
        for row, line, value in zip(rows, lines, values, strict=True):
            deviation = _format_value(column, line.get(column.deviation, ""))
            row[shown] = _format_value(column, value) + f" ± {deviation}" * bool(deviation)
    return rows


def _scale_bytes(column: Column, values: Sequence[Value]) -> tuple[Column, list[Value]]:
    """Scales a column of bytes to a suitable unit; its new title and values."""
    divisor, unit = scaled_bytes(max((value for value in values if not isinstance(value, str)), default=0))
    scaled: list[Value] = [math.nan if isinstance(value, str) else value / divisor for value in values]
    return replace(column, title=f"{column.in_bytes} ({unit})"), scaled


def choose_targets(runs: Sequence[Run]) -> list[float]:
    """The default targets of a report, accuracies as shares: what all runs reach, and 90 % of the best of all."""
    best = [float(np.nanmax(mean)) for run in runs if not np.isnan(mean := run.columns["accuracy_mean"]).all()]
    worst = min(best, default=0.0)
    common = max(percent / 100 for percent in range(101) if percent / 100 <= worst)  # 100 * 0.57 is below 57
    share = math.floor(1000 * _SHARE_OF_BEST * max(best, default=0.0)) / 1000
    return list(dict.fromkeys(target for target in (common, share) if target > 0))
