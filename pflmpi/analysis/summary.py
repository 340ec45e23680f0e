"""The summary table of runs: the main measure, losses, cost, cost to a target, gain over local training."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from pflmpi.analysis.comparable import list_compared_options, main_measure, seed_groups
from pflmpi.analysis.metrics import compute_cost_to, find_best_round, find_last_value
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun
from pflmpi.analysis.series.clients import compute_gains_over_local
from pflmpi.learning.main_measure import ACCURACY, MainMeasure, of_validation
from pflmpi.text import scaled_bytes

Value = str | int | float
Line = dict[str, Value]  # by column; unknown numbers are NaN or ""

_OF_BEST = 0.9  # of the best accuracy of all runs, to which costs are counted
_OF_MAIN = (  # columns of the main measure, which they name in brackets; accuracy is %
    *("best", "validation", "last", "std over clients", "worst client", "lowest 10 %", "highest 10 %"),
    *("unseen", "after training", "gain over local"),
)
_OPTIONAL = (  # left out where empty
    *("validation", "lowest 10 %", "highest 10 %", "unseen", "after training", "accuracy (%)", "macro F1 (%)"),
    *("gain over local", "clients below local"),
)
_STD = "±"  # after the name of a column: its standard deviation over seeds
_FOUR_DIGITS = ("training loss", "test loss", "time per round (s)")


def describe_columns(measure: MainMeasure) -> str:
    """What the columns of a table are, in which this is the main measure."""
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


def column_of(name: str) -> str:
    """What a column is called whatever the main measure.

    >>> column_of("best (rmse)"), column_of("lowest 10 % (%)"), column_of("time (s)")
    ('best', 'lowest 10 %', 'time (s)')
    """
    start = name.removesuffix(f" {_STD}").rpartition(" (")[0]
    return start if start in _OF_MAIN else name.removesuffix(f" {_STD}")


def summarize_runs(runs: Sequence[NamedRun], targets: Sequence[float] = ()) -> list[Line]:
    """The line of each run, with the cost to targets (accuracies, as shares); empty optional columns are left out."""
    gains = {named_run: gain for named_run, _, gain in compute_gains_over_local(runs)[1]}
    options, measure = (
        list_compared_options([named_run.run for named_run in runs]),
        main_measure([one.run for one in runs]),
    )
    lines, gained = list[Line](), "gain over local" + f" ({_unit(measure)})" * (measure != ACCURACY)
    for place, named_run in enumerate(runs):
        run, gain = named_run.run, gains.get(named_run, np.array(np.nan))
        compared = not np.isnan(gain).all()
        line: Line = {"run": named_run.label, "folder": str(run.path)}
        line |= {key: texts[place] for key, texts in options.items()}
        line |= results(run, measure)
        line[gained] = float(np.nanmean(gain)) if compared else math.nan
        line["clients below local"] = int((gain < 0).sum()) if compared else ""
        for target in targets:
            cost, to = compute_cost_to(run.columns, target), f"to {100 * target:g} %"
            line[f"rounds {to}"] = "" if cost is None else cost.rounds
            line[f"time {to} (s)"] = math.nan if cost is None else cost.seconds
            line[f"bytes {to}"] = "" if cost is None else cost.up_bytes + cost.down_bytes
        lines.append(line)
    optional = [name for name in lines[0] if column_of(name) in _OPTIONAL]
    empty = [name for name in optional if all(str(line[name]) in ("", "nan") for line in lines)]
    return [{name: value for name, value in line.items() if name not in empty} for line in lines]


def over_seeds(runs: Sequence[NamedRun], lines: Sequence[Line]) -> list[Line]:
    """A line for each group of runs that differ in the seed alone, with means, and standard deviations as `NAME ±`.

    Args:
        lines: of the runs, by `summarize_runs`; where no two differ in the seed alone, they are returned as they are.
    """
    groups, of_run = seed_groups(runs), dict(zip(runs, lines, strict=True))
    if len(groups) == len(runs):
        return list(lines)
    merged: list[Line] = []
    for group in groups:
        line: Line = {"run": group.label, "seeds": len(group.runs)}
        for name in lines[0]:
            values = [of_run[named_run][name] for named_run in group.runs]
            if name == "folder":
                line[name] = str(group.folder) if len(values) > 1 else values[0]
            elif name != "run":
                line |= _average_column(name, values)
        merged.append(line)
    return merged


def _average_column(name: str, values: Sequence[Value]) -> Line:
    """The mean of a column over seeds, unknown where one is; of floats the standard deviation too."""
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return {name: "" if numbers else ", ".join(dict.fromkeys(map(str, values)))}
    mean: Line = {name: values[0] if len({*numbers}) == 1 else statistics.fmean(numbers)}
    if isinstance(values[0], float):
        several = len(numbers) > 1 and np.isfinite(numbers).all()
        mean[f"{name} {_STD}"] = statistics.stdev(numbers) if several else math.nan
    return mean


def results(run: Run, measure: MainMeasure = ACCURACY) -> Line:
    """Results of a run by column, from its metrics and those of the clients at its end; those of `measure` come first.

    Raises:
        CheckpointError: its metrics are damaged.
    """
    columns, seconds = run.columns, run.columns["seconds"]
    newest = {name: find_last_value(values) for name, values in columns.items()}
    return {
        "rounds": len(seconds),
        "of": int(run.config.get("training", {}).get("rounds", 0)),
        **_main_measure_columns(run, measure, newest),
        **({} if measure == ACCURACY else {"accuracy (%)": 100 * newest.get("accuracy_mean", math.nan)}),
        "macro F1 (%)": 100 * newest.get("f1_macro", math.nan),
        "training loss": newest.get("train_loss", math.nan),
        "test loss": newest.get("test_loss", math.nan),
        "up (bytes)": _sum_bytes(columns["up_bytes"]),
        "down (bytes)": _sum_bytes(columns["down_bytes"]),
        "up, wire (bytes)": _sum_bytes(columns["wire_up_bytes"]),
        "down, wire (bytes)": _sum_bytes(columns["wire_down_bytes"]),
        "time (s)": float(seconds.sum()),
        "time per round (s)": float(seconds.mean()) if len(seconds) else math.nan,
    }


def _sum_bytes(values: np.ndarray) -> Value:
    """The sum of a column of bytes; "" where figures of rounds are lost."""
    return "" if np.isnan(values).any() else int(values.sum())


def _main_measure_columns(run: Run, measure: MainMeasure, newest: Mapping[str, float]) -> Line:
    """The columns of the main measure.

    Args:
        newest: the last value of each column of metrics.csv.
    """
    columns, clients, name, scale = run.columns, run.final(measure), measure.name, measure.scale
    unmeasured = np.full(len(columns["round"]), np.nan)
    place = find_best_round(columns, measure=measure) if run.has(measure) else None
    mean, validation = (columns.get(key, unmeasured) for key in (measure.column, of_validation(measure.column)))
    with np.errstate(invalid="ignore"):  # of infinite values it is NaN
        spread = math.nan if clients is None else float(np.nanstd(clients))
    worst = math.nan if clients is None else float((np.nanmax if measure.lower else np.nanmin)(clients))
    values = {
        "best": math.nan if place is None else float(mean[place]),
        "validation": math.nan if place is None else float(validation[place]),
        "last": newest.get(measure.column, math.nan),
        "std over clients": newest.get("accuracy_std", math.nan) if measure == ACCURACY else spread,
        "worst client": worst,
        f"{'highest' if measure.lower else 'lowest'} 10 %": newest.get(f"{name}_bottom", math.nan),
        "unseen": newest.get(f"unseen_{measure.column}", math.nan),
        "after training": newest.get(f"trained_{measure.column}", math.nan),
    }
    line: Line = {}
    for key, value in values.items():
        line[f"{key} ({_unit(measure)})"] = scale * value
        if key == "best":
            line["in round"] = "" if place is None else int(columns["round"][place])
    return line


def _unit(measure: MainMeasure) -> str:
    return "%" if measure == ACCURACY else f"{measure.words}, %" if measure.percent else measure.words


def format_line(line: Mapping[str, Value]) -> dict[str, str]:
    """The values of a line as texts; unknown ones are empty."""
    digits = {name: 4 if _has_four_digits(name.removesuffix(f" {_STD}")) else 2 for name in line}
    return {
        name: "" if value != value else f"{value:.{digits[name]}f}" if isinstance(value, float) else str(value)
        for name, value in line.items()
    }


def _has_four_digits(name: str) -> bool:
    return name in _FOUR_DIGITS or (column_of(name) != name and not name.endswith("%)"))


def for_readers(lines: Sequence[Line]) -> list[dict[str, str]]:
    """`format_line` of lines with bytes in one unit, which the names of these columns say, and mean ± deviation in "
    "one."""
    scaled: list[Line] = [{} for _ in lines]
    for name in lines[0]:
        values = [line[name] for line in lines]
        if "bytes" in name:
            name, values = _scale_bytes(name, values)
        for line, value in zip(scaled, values, strict=True):
            line[name] = value
    return [_append_deviations(format_line(line)) for line in scaled]


def _append_deviations(texts: dict[str, str]) -> dict[str, str]:
    """Texts of means with their deviations behind them."""
    deviations = {name: texts.pop(name) for name in list(texts) if name.endswith(f" {_STD}")}
    return {
        name: f"{text} {_STD} {deviation}" if (deviation := deviations.get(f"{name} {_STD}")) else text
        for name, text in texts.items()
    }


def _scale_bytes(name: str, values: Sequence[Value]) -> tuple[str, list[Value]]:
    divisor, unit = scaled_bytes(max((value for value in values if not isinstance(value, str)), default=0))
    scaled: list[Value] = [math.nan if isinstance(value, str) else value / divisor for value in values]
    if name.startswith("bytes to"):
        return f"sent {name.removeprefix('bytes ')} ({unit})", scaled
    return name.replace("(bytes)", f"({unit})"), scaled


def choose_targets(runs: Sequence[Run]) -> list[float]:
    """The accuracies that a report counts the cost to, as shares: what all runs reach, and 90 % of the best of all."""
    reached = [float(np.nanmax(mean)) for run in runs if not np.isnan(mean := run.columns["accuracy_mean"]).all()]
    common = math.floor(100 * min(reached, default=0.0)) / 100
    share = math.floor(1000 * _OF_BEST * max(reached, default=0.0)) / 1000
    return list(dict.fromkeys(target for target in (common, share) if target > 0))
