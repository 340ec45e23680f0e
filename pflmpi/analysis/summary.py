"""The summary table of runs: accuracy, losses, cost, cost to a target, gain over local training."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from pflmpi.analysis.comparable import compared_options, seed_groups
from pflmpi.analysis.metrics import best, cost_to, last
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun
from pflmpi.analysis.series.clients import gains_over_local
from pflmpi.text import scaled_bytes

Value = str | int | float
Line = dict[str, Value]  # by column; unknown numbers are NaN or ""

EXPLAINED = (
    "Best and last: accuracy, mean over clients, on test samples; of a run with validation samples the best round is "
    "the one that these choose, and validation is their accuracy in it; worst client and lowest 10 %: at the end; "
    "unseen: clients that were kept out of training; after training: the participants before the server answers; gain "
    "over local: accuracy at the end minus that of the same client in the run of local training; bytes: what the "
    "messages of all rounds hold; rounds, time and sent to an accuracy: until the first round whose mean is as high. "
    "More in docs/analysis.md."
)
_OF_BEST = 0.9  # of the best accuracy of all runs, to which costs are counted
_OPTIONAL = (  # left out where empty
    "validation (%)",
    "lowest 10 % (%)",
    "macro F1 (%)",
    "unseen (%)",
    "after training (%)",
    "gain over local",
    "clients below local",
)
_STD = "±"  # after the name of a column: its standard deviation over seeds
_FOUR_DIGITS = ("training loss", "test loss", "time per round (s)")


def summaries(runs: Sequence[NamedRun], targets: Sequence[float] = ()) -> list[Line]:
    """The line of each run, with the cost to targets (accuracies, as shares); empty optional columns are left out."""
    gains = {named_run: gain for named_run, _, gain in gains_over_local(runs)[1]}
    options = compared_options([named_run.run for named_run in runs])
    lines: list[Line] = []
    for place, named_run in enumerate(runs):
        run, gain = named_run.run, gains.get(named_run, np.array(np.nan))
        compared = not np.isnan(gain).all()
        line: Line = {"run": named_run.label, "folder": str(run.path)}
        line |= {key: texts[place] for key, texts in options.items()}
        line |= results(run)
        line["gain over local"] = float(np.nanmean(gain)) if compared else math.nan
        line["clients below local"] = int((gain < 0).sum()) if compared else ""
        for target in targets:
            cost, to = cost_to(run.columns, target), f"to {100 * target:g} %"
            line[f"rounds {to}"] = "" if cost is None else cost.rounds
            line[f"time {to} (s)"] = math.nan if cost is None else cost.seconds
            line[f"bytes {to}"] = "" if cost is None else cost.up_bytes + cost.down_bytes
        lines.append(line)
    empty = [name for name in lines[0] if name in _OPTIONAL and all(str(line[name]) in ("", "nan") for line in lines)]
    return [{name: value for name, value in line.items() if name not in empty} for line in lines]


def over_seeds(runs: Sequence[NamedRun], lines: Sequence[Line]) -> list[Line]:
    """A line for each group of runs that differ in the seed alone, with means, and standard deviations as `NAME ±`.

    Args:
        lines: of the runs, by `summaries`; where no two differ in the seed alone, they are returned as they are.
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
                line |= _mean(name, values)
        merged.append(line)
    return merged


def _mean(name: str, values: Sequence[Value]) -> Line:
    """The mean of a column over seeds, unknown where one is; of floats the standard deviation too."""
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return {name: "" if numbers else ", ".join(dict.fromkeys(map(str, values)))}
    mean: Line = {name: values[0] if len({*numbers}) == 1 else statistics.fmean(numbers)}
    if isinstance(values[0], float):
        several = len(numbers) > 1 and np.isfinite(numbers).all()
        mean[f"{name} {_STD}"] = statistics.stdev(numbers) if several else math.nan
    return mean


def results(run: Run) -> Line:
    """Results of a run by column, from its metrics and the clients' accuracies at its end.

    Raises:
        CheckpointError: its metrics are damaged.
    """
    columns, final = run.columns, run.final_accuracy
    mean, seconds = 100 * columns["accuracy_mean"], columns["seconds"]
    validation = 100 * columns.get("validation_accuracy_mean", np.full(len(mean), np.nan))
    highest = best(columns)
    newest = {name: last(values) for name, values in columns.items()}

    def percent(name: str) -> float:
        return 100 * newest.get(name, math.nan)

    return {
        "rounds": len(mean),
        "of": int(run.config.get("training", {}).get("rounds", 0)),
        "best (%)": math.nan if highest is None else float(mean[highest]),
        "in round": "" if highest is None else int(columns["round"][highest]),
        "validation (%)": math.nan if highest is None else float(validation[highest]),
        "last (%)": percent("accuracy_mean"),
        "std over clients (%)": percent("accuracy_std"),
        "worst client (%)": math.nan if final is None else float(np.nanmin(100 * final)),
        "lowest 10 % (%)": percent("accuracy_bottom"),
        "macro F1 (%)": percent("f1_macro"),
        "unseen (%)": percent("unseen_accuracy_mean"),
        "after training (%)": percent("trained_accuracy_mean"),
        "training loss": newest.get("train_loss", math.nan),
        "test loss": newest.get("test_loss", math.nan),
        "up (bytes)": int(columns["up_bytes"].sum()),
        "down (bytes)": int(columns["down_bytes"].sum()),
        "up, wire (bytes)": int(columns["wire_up_bytes"].sum()),
        "down, wire (bytes)": int(columns["wire_down_bytes"].sum()),
        "time (s)": float(seconds.sum()),
        "time per round (s)": float(seconds.mean()) if len(seconds) else math.nan,
    }


def texts(line: Mapping[str, Value]) -> dict[str, str]:
    """The values of a line as texts; unknown ones are empty."""
    digits = {name: 4 if name.removesuffix(f" {_STD}") in _FOUR_DIGITS else 2 for name in line}
    return {
        name: "" if value != value else f"{value:.{digits[name]}f}" if isinstance(value, float) else str(value)
        for name, value in line.items()
    }


def for_readers(lines: Sequence[Line]) -> list[dict[str, str]]:
    """`texts` of lines with bytes in one unit, which the names of these columns say, and mean ± deviation in one."""
    scaled: list[Line] = [{} for _ in lines]
    for name in lines[0]:
        values = [line[name] for line in lines]
        if "bytes" in name:
            name, values = _in_one_unit(name, values)
        for line, value in zip(scaled, values, strict=True):
            line[name] = value
    return [_with_deviations(texts(line)) for line in scaled]


def _with_deviations(texts: dict[str, str]) -> dict[str, str]:
    """Texts of means with their deviations behind them."""
    deviations = {name: texts.pop(name) for name in list(texts) if name.endswith(f" {_STD}")}
    return {
        name: f"{text} {_STD} {deviation}" if (deviation := deviations.get(f"{name} {_STD}")) else text
        for name, text in texts.items()
    }


def _in_one_unit(name: str, values: Sequence[Value]) -> tuple[str, list[Value]]:
    divisor, unit = scaled_bytes(max((value for value in values if not isinstance(value, str)), default=0))
    scaled: list[Value] = [math.nan if isinstance(value, str) else value / divisor for value in values]
    if name.startswith("bytes to"):
        return f"sent {name.removeprefix('bytes ')} ({unit})", scaled
    return name.replace("(bytes)", f"({unit})"), scaled


def targets_of(runs: Sequence[Run]) -> list[float]:
    """The accuracies that a report counts the cost to, as shares: what all runs reach, and 90 % of the best of all."""
    reached = [float(np.nanmax(mean)) for run in runs if not np.isnan(mean := run.columns["accuracy_mean"]).all()]
    common = math.floor(100 * min(reached, default=0.0)) / 100
    share = math.floor(1000 * _OF_BEST * max(reached, default=0.0)) / 1000
    return list(dict.fromkeys(target for target in (common, share) if target > 0))
