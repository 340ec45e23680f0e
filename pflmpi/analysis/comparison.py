"""Runs beside one another: in which options they differ, and what came of it."""

import math
from collections.abc import Sequence
from typing import Any

from pflmpi.analysis.columns import best, last
from pflmpi.analysis.comparable import NOT_COMPARED, WHERE_ONLY
from pflmpi.analysis.run import Run
from pflmpi.config.sections import by_key
from pflmpi.text import size

_UNKNOWN = "-"

TextsByName = dict[str, list[str]]  # name -> a text for each run


def differing(runs: Sequence[Run]) -> TextsByName:
    """The options in which the configurations of runs differ, with the value of each."""
    options = [_options(run) for run in runs]
    keys = dict.fromkeys(key for each in options for key in each)
    return {
        key: [_text(each[key]) if key in each else _UNKNOWN for each in options]
        for key in keys
        if any(key not in each or each[key] != options[0].get(key) for each in options)
    }


def compared_options(runs: Sequence[Run]) -> TextsByName:
    """The options that have unlike values in runs, "" in those that lack them; not those that single runs have."""
    found = differing(runs)
    return {
        key.removeprefix("algorithm."): ["" if text == _UNKNOWN else text for text in texts]
        for key, texts in found.items()
        if key not in ("algorithm.name", "training.rounds") and len({*texts} - {_UNKNOWN}) > 1
    }


def results(runs: Sequence[Run]) -> TextsByName:
    """What the metrics of runs say of accuracy, losses, seconds and bytes; "-" where one has no such figure.

    Raises:
        CheckpointError: a metrics file is damaged.
    """
    return {name: [each[name] for each in map(_results, runs)] for name in _results(runs[0])}


def _options(run: Run) -> dict[str, Any]:
    options = by_key({key: value for key, value in run.config.items() if key not in NOT_COMPARED})
    return {key: value for key, value in options.items() if key not in WHERE_ONLY}


def _text(value: object) -> str:
    """A value as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _results(run: Run) -> dict[str, str]:
    columns = run.columns
    mean, seconds = columns["accuracy_mean"], columns["seconds"]
    highest = best(mean)
    of = run.config.get("training", {}).get("rounds", "?")
    newest = {name: last(values) for name, values in columns.items()}
    found = {
        "rounds": f"{len(mean)} of {of}",
        "accuracy, mean (%)": _percent(newest["accuracy_mean"]),
        "  std over clients (%)": _percent(newest["accuracy_std"]),
        "  lowest 10 % of clients (%)": _percent(newest.get("accuracy_bottom", math.nan)),
        "  unseen clients (%)": _percent(newest.get("unseen_accuracy_mean", math.nan)),
        "best accuracy, mean (%)": _UNKNOWN if highest is None else _percent(mean[highest]),
        "  in round": _UNKNOWN if highest is None else str(columns["round"][highest]),
        "macro F1 (%)": _percent(newest.get("f1_macro", math.nan)),
        "training loss": _number(newest.get("train_loss", math.nan)),
        "test loss": _number(newest.get("test_loss", math.nan)),
        "seconds": f"{seconds.sum():.1f}",
        "  per round": f"{seconds.mean():.3f}" if len(seconds) else _UNKNOWN,
    }
    for way in ("up", "down"):
        found[f"bytes {way}"] = size(int(columns[f"{way}_bytes"].sum()))
        found[f"  {way} on the wire"] = size(int(columns[f"wire_{way}_bytes"].sum()))
    return found


def _percent(share: float) -> str:
    return _UNKNOWN if math.isnan(share) else f"{100 * share:.2f}"


def _number(value: float) -> str:
    return _UNKNOWN if math.isnan(value) else f"{value:.4f}"
