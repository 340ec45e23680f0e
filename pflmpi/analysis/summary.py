"""The summary table of runs: the main measure, losses, cost, cost to a target, gain over local training."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pflmpi.analysis.comparable import choose_main_measure, group_by_seed, list_compared_options
from pflmpi.analysis.metrics import compute_cost_to, compute_deviation, compute_mean, find_best_round
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun
from pflmpi.analysis.series.clients import compute_gains_over_local
from pflmpi.learning.main_measure import ACCURACY, MainMeasure, to_validation_name
from pflmpi.text import scaled_bytes

Value = str | int | float
Line = dict[str, Value]  # by column; unknown numbers are NaN or ""

_SHARE_OF_BEST = 0.9  # the second default target, as a share of the best accuracy of all runs
_MAIN_COLUMNS = (  # columns of the main measure, followed by its name in brackets, or by (%) for accuracy
    *("best", "validation", "last", "std over clients", "worst client", "lowest 10 %", "highest 10 %"),
    *("unseen", "after training", "gain over local"),
)
_OPTIONAL = (  # columns that are left out if no run has a value
    *("validation", "lowest 10 %", "highest 10 %", "unseen", "after training", "accuracy (%)", "macro F1 (%)"),
    *("gain over local", "clients below local"),
)
_STD = "±"  # suffix of columns of standard deviations over seeds
_FOUR_DIGITS = ("training loss", "test loss", "time per round (s)")


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


def strip_measure(name: str) -> str:
    """The name of a column without the name or unit of the main measure.

    >>> strip_measure("best (rmse)"), strip_measure("lowest 10 % (%)"), strip_measure("time (s)")
    ('best', 'lowest 10 %', 'time (s)')
    """
    name = name.removesuffix(f" {_STD}")
    start = name.rpartition(" (")[0]
    return start if start in _MAIN_COLUMNS else name


def summarize_runs(runs: Sequence[NamedRun], targets: Sequence[float] = ()) -> list[Line]:
    """A line for each run.

    Args:
        targets: accuracies, as shares, to which costs are counted.
    """
    plain_runs = [named_run.run for named_run in runs]
    gains = {named_run: gain for named_run, _, gain in compute_gains_over_local(runs)[1]}
    measure = choose_main_measure(plain_runs)
    results = [summarize_run(run, measure) for run in plain_runs]
    options = list_compared_options(plain_runs, {"run", "seeds", "folder"}.union(*results))
    gain_column = "gain over local" if measure == ACCURACY else f"gain over local ({_unit(measure)})"
    lines: list[Line] = []
    for index, named_run in enumerate(runs):
        run, gain = named_run.run, gains.get(named_run, np.array(np.nan))
        has_gain = not np.isnan(gain).all()
        line: Line = {"run": named_run.label, "folder": str(run.path)}
        line |= {key: texts[index] for key, texts in options.items()}
        line |= results[index]
        with np.errstate(invalid="ignore"):  # infinities of both signs have no mean
            line[gain_column] = float(np.nanmean(gain)) if has_gain else math.nan
        line["clients below local"] = int((gain < 0).sum()) if has_gain else ""
        for target in targets:
            cost, to = compute_cost_to(run.columns, target), f"to {100 * target:g} %"
            line[f"rounds {to}"] = "" if cost is None else cost.rounds
            line[f"time {to} (s)"] = math.nan if cost is None else cost.seconds
            line[f"bytes {to}"] = "" if cost is None else cost.up_bytes + cost.down_bytes
        lines.append(line)
    optional = [name for name in lines[0] if strip_measure(name) in _OPTIONAL]
    empty = [name for name in optional if all(str(line[name]) in ("", "nan") for line in lines)]
    return [{name: value for name, value in line.items() if name not in empty} for line in lines]


def average_seeds(runs: Sequence[NamedRun], lines: Sequence[Line]) -> list[Line]:
    """A line for each group of runs that differ only in the seed, with means, and standard deviations as `NAME ±`.

    Args:
        lines: the lines of the runs; returned unchanged if no two runs differ only in the seed.
    """
    groups, line_of = group_by_seed(runs), dict(zip(runs, lines, strict=True))
    if len(groups) == len(runs):
        return list(lines)
    merged: list[Line] = []
    for group in groups:
        line: Line = {"run": group.label, "seeds": len(group.runs)}
        for name in lines[0]:
            values = [line_of[named_run][name] for named_run in group.runs]
            if name == "folder":
                line[name] = str(group.folder) if len(values) > 1 else values[0]
            elif name != "run":
                line |= _average_column(name, values)
        merged.append(line)
    return merged


def _average_column(name: str, values: Sequence[Value]) -> Line:
    """The mean of a column over seeds, empty if a value is missing; for floats also the standard deviation."""
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return {name: "" if numbers else ", ".join(dict.fromkeys(map(str, values)))}
    mean: Line = {name: values[0] if len({*numbers}) == 1 else compute_mean(numbers)}
    if isinstance(values[0], float):
        mean[f"{name} {_STD}"] = compute_deviation(numbers)
    return mean


def summarize_run(run: Run, measure: MainMeasure = ACCURACY) -> Line:
    """The results of a run by column, those of `measure` first.

    Raises:
        CheckpointError: its metrics are damaged.
    """
    columns, seconds = run.columns, run.columns["seconds"]
    last = _read_last_evaluation(run, measure)
    return {
        "rounds": len(seconds),
        "of": int(run.config.get("training", {}).get("rounds", 0)),
        **_main_measure_columns(run, measure, last),
        **({} if measure == ACCURACY else {"accuracy (%)": 100 * last.get("accuracy_mean", math.nan)}),
        "macro F1 (%)": 100 * last.get("f1_macro", math.nan),
        "training loss": last.get("train_loss", math.nan),
        "test loss": last.get("test_loss", math.nan),
        "up (bytes)": _sum_bytes(columns["up_bytes"]),
        "down (bytes)": _sum_bytes(columns["down_bytes"]),
        "up, wire (bytes)": _sum_bytes(columns["wire_up_bytes"]),
        "down, wire (bytes)": _sum_bytes(columns["wire_down_bytes"]),
        "time (s)": float(seconds.sum()),
        "time per round (s)": float(seconds.mean()) if len(seconds) else math.nan,
    }


def _read_last_evaluation(run: Run, measure: MainMeasure) -> dict[str, float]:
    """The values of the last round with an evaluation by column, of the last round if none has one; {} without rounds.

    A column without a value in that round is NaN, not what it was in an older one.
    """
    main = measure if run.has(measure) else run.main_measure
    evaluated = np.flatnonzero(~np.isnan(run.columns[main.column])) if run.has(main) else []
    index = evaluated[-1] if len(evaluated) else -1
    return {name: float(values[index]) for name, values in run.columns.items() if len(values)}


def _sum_bytes(values: np.ndarray) -> Value:
    """The sum of a column of bytes; "" if metrics of rounds are lost."""
    return "" if np.isnan(values).any() else int(values.sum())


def _main_measure_columns(run: Run, measure: MainMeasure, last: Mapping[str, float]) -> Line:
    """The columns of the main measure.

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
    values = {
        "best": best,
        "validation": validation,
        "last": last.get(measure.column, math.nan),
        "std over clients": last.get("accuracy_std", math.nan) if measure == ACCURACY else std,
        "worst client": worst,
        f"{'highest' if measure.lower else 'lowest'} 10 %": last.get(f"{measure.name}_bottom", math.nan),
        "unseen": last.get(f"unseen_{measure.column}", math.nan),
        "after training": last.get(f"trained_{measure.column}", math.nan),
    }
    line: Line = {}
    for key, value in values.items():
        line[f"{key} ({_unit(measure)})"] = measure.scale * value
        if key == "best":
            line["in round"] = best_round
    return line


def _unit(measure: MainMeasure) -> str:
    """What columns of the main measure have in brackets."""
    if measure == ACCURACY:
        return "%"
    return f"{measure.words}, %" if measure.percent else measure.words


def format_line(line: Mapping[str, Value]) -> dict[str, str]:
    """The values of a line as texts; unknown ones are empty."""
    return {name: _format_value(name, value) for name, value in line.items()}


def _format_value(column: str, value: Value) -> str:
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return ""
    name = column.removesuffix(f" {_STD}")
    has_four_digits = name in _FOUR_DIGITS or (strip_measure(name) != name and not name.endswith("%)"))
    return f"{value:.{4 if has_four_digits else 2}f}"


def format_lines(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Formats lines with bytes in a common unit, named in the column, and means with their deviations in one cell."""
    scaled: list[Line] = [{} for _ in lines]
    for name in lines[0]:
        values = [line[name] for line in lines]
        if "bytes" in name:
            name, values = _scale_bytes(name, values)
        for line, value in zip(scaled, values, strict=True):
            line[name] = value
    return [_append_deviations(format_line(line)) for line in scaled]


def _append_deviations(texts: dict[str, str]) -> dict[str, str]:
    """Moves standard deviations into the cells of their means."""
    deviations = {name: texts.pop(name) for name in list(texts) if name.endswith(f" {_STD}")}
    return {
        name: f"{text} {_STD} {deviation}" if (deviation := deviations.get(f"{name} {_STD}")) else text
        for name, text in texts.items()
    }


def _scale_bytes(name: str, values: Sequence[Value]) -> tuple[str, list[Value]]:
    """Scales a column of bytes to a suitable unit; its new name and values."""
    divisor, unit = scaled_bytes(max((value for value in values if not isinstance(value, str)), default=0))
    scaled: list[Value] = [math.nan if isinstance(value, str) else value / divisor for value in values]
    if name.startswith("bytes to"):
        return f"sent {name.removeprefix('bytes ')} ({unit})", scaled
    return name.replace("(bytes)", f"({unit})"), scaled


def choose_targets(runs: Sequence[Run]) -> list[float]:
    """The default targets of a report, accuracies as shares: what all runs reach, and 90 % of the best of all."""
    best = [float(np.nanmax(mean)) for run in runs if not np.isnan(mean := run.columns["accuracy_mean"]).all()]
    worst = min(best, default=0.0)
    common = max(percent / 100 for percent in range(101) if percent / 100 <= worst)  # 100 * 0.57 is below 57
    share = math.floor(1000 * _SHARE_OF_BEST * max(best, default=0.0)) / 1000
    return list(dict.fromkeys(target for target in (common, share) if target > 0))
