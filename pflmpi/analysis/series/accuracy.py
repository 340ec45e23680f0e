"""Accuracy, loss and other measures over rounds."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from pflmpi.analysis.comparable import NOT_COMPARED
from pflmpi.analysis.plots import Curve, Curves, Missing
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun, spread_over
from pflmpi.errors import CheckpointError

QUANTILES = (0.1, 0.9)
_TITLE = "Accuracy over rounds"
BAND = (
    "The band has the middle 80 % of the clients (quantiles 0.1 and 0.9); it is there only in rounds that have a "
    "checkpoint, as only these keep the accuracy of each client."
)


def accuracy_over_rounds(runs: Sequence[NamedRun]) -> Curves | Missing:
    """Mean accuracy over clients by round, the best marked; of one run with a band over clients where it is known."""
    alone = len(runs) == 1
    curves = [of_run(one, alone) for one in runs if evaluated(one.run).any()]
    if not curves:
        return Missing(_TITLE, "no round has been evaluated yet")
    caption = f"Mean over clients; the best round is marked with a ring. {BAND if alone else ''}".strip()
    if alone and np.isnan(np.asarray(curves[0].low)).mean() > 0.5:
        columns = runs[0].run.columns
        seen = evaluated(runs[0].run)
        x, y, std = (columns[name][seen] for name in ("round", "accuracy_mean", "accuracy_std"))
        caption += " The thin lines are one standard deviation over clients below and above the mean, up to 100 %."
        curves += [
            Curve("mean ± standard deviation", x, np.clip(100 * (y + sign * std), 0, 100), style=1, thin=True)
            for sign in (-1, 1)
        ]
    return Curves(
        name="accuracy_over_rounds",
        title=_TITLE,
        caption=caption,
        x_label="round",
        y_label="accuracy, mean over clients (%)",
        curves=tuple(curves),
        by_round=True,
        percent=True,
    )


_MEASURES = {
    "accuracy_bottom": (
        "Accuracy of the lowest 10 % of clients over rounds",
        "Mean over the tenth of the clients with the lowest accuracy in the round.",
        "accuracy, lowest 10 % (%)",
    ),
    "f1_macro": (
        "Macro F1 over rounds",
        "Mean over clients of the plain mean of F1 over the classes that a client has or predicts.",
        "macro F1, mean over clients (%)",
    ),
    "unseen_accuracy_mean": (
        "Accuracy of unseen clients over rounds",
        "Clients that were kept out of training and join as newcomers with the state of the round; their mean.",
        "accuracy, mean over unseen clients (%)",
    ),
    "trained_accuracy_mean": (
        "Accuracy after local training over rounds",
        "The participants of each round with the models that local training leaves, before the server answers.",
        "accuracy, mean over participants (%)",
    ),
}


def measures_over_rounds(runs: Sequence[NamedRun]) -> list[Curves]:
    """Further measures by round; no figure of one that no run has."""
    figures: list[Curves] = []
    for name, (title, caption, label) in _MEASURES.items():
        if curves := _by_round(runs, name, 100):
            figures.append(replace(_curves(name, title, caption, label, curves), percent=True))
    return figures


def _curves(name: str, title: str, caption: str, label: str, curves: tuple[Curve, ...]) -> Curves:
    name = f"{name}_over_rounds"
    return Curves(name=name, title=title, caption=caption, x_label="round", y_label=label, curves=curves, by_round=True)


def _by_round(runs: Sequence[NamedRun], name: str, scale: float) -> tuple[Curve, ...]:
    """The curve of a column, of each run that has it."""
    columns = [(one, one.run.columns["round"], one.run.columns.get(name)) for one in runs]
    return tuple(
        Curve(
            one.legend, rounds[~np.isnan(values)], scale * values[~np.isnan(values)], style=one.style, source=one.label
        )
        for one, rounds, values in columns
        if values is not None and not np.isnan(values).all()
    )


def losses_over_rounds(runs: Sequence[NamedRun]) -> list[Curves]:
    """Training and test loss by round; no figure of a loss that no run has recorded."""
    captions = {
        "train_loss": "Mean over the participants of a round and their local steps, of what they minimise: with every "
        "term that an algorithm adds, so that runs of different algorithms show different sums.",
        "test_loss": "Cross-entropy per test sample, mean over clients, in evaluated rounds.",
    }
    figures: list[Curves] = []
    for name, title in {"train_loss": "Training loss over rounds", "test_loss": "Test loss over rounds"}.items():
        if curves := _by_round(runs, name, 1):
            label = "loss, mean over clients"
            figures.append(_curves(name, title, captions[name], label, curves))
    return figures


def client_accuracy(run: Run, rounds: Sequence[int]) -> dict[int, np.ndarray]:
    """Accuracy [N] of each client, for those of the rounds that have a good checkpoint with scores."""
    known = run.accuracies  # each file is read once for all figures
    for number in rounds:
        if number not in known:
            known[number] = _accuracy(run, number)
    return {number: accuracy for number in rounds if (accuracy := known[number]) is not None}


def _accuracy(run: Run, number: int) -> np.ndarray | None:
    try:
        found = run.round(number).metric("accuracy")
    except CheckpointError:
        return None  # `analysis.comparable` reports damaged files
    return None if found is None or np.isnan(found).all() else found


def evaluated(run: Run) -> np.ndarray:
    """Whether a line of the metrics has an accuracy, [rounds] bool."""
    return np.asarray(~np.isnan(run.columns["accuracy_mean"]), bool)


def of_run(one: NamedRun, banded: bool) -> Curve:
    """The mean accuracy of a run by round, with its band where that is known and wanted."""
    columns, seen = one.run.columns, evaluated(one.run)
    rounds, mean = columns["round"][seen], 100 * columns["accuracy_mean"][seen]
    low = high = None
    if banded:
        low, high = np.full(len(rounds), np.nan), np.full(len(rounds), np.nan)
        for number, accuracy in client_accuracy(one.run, spread_over(one.run.rounds)).items():
            place = np.flatnonzero(rounds == number)
            low[place], high[place] = (100 * np.nanquantile(accuracy, q) for q in QUANTILES)
    return Curve(one.legend, rounds, mean, low, high, int(np.nanargmax(mean)), style=one.style, source=one.label)


def bands_over_rounds(runs: Sequence[NamedRun]) -> list[Curves]:
    """The bands over clients of several runs, side by side; no figure without any."""
    curves = [replace(of_run(one, True), label=one.label) for one in runs if evaluated(one.run).any()]
    if all(np.isnan(np.asarray(curve.low)).all() for curve in curves):
        return []
    figure = Curves(
        name="accuracy_of_clients",
        title="Accuracy of the clients over rounds",
        caption=f"Mean over clients of each run. {BAND}",
        x_label="round",
        y_label="accuracy (%)",
        curves=tuple(curves),
        apart=True,
        by_round=True,
        percent=True,
    )
    return [figure]


_CONFIDENCE = 0.95


def merged(plot: Curves | Missing, runs: Sequence[NamedRun]) -> Curves | Missing:
    """A figure with one curve for each group of runs that differ in the seed alone, where there are any."""
    groups = [group for group in _groups(runs) if len(group) > 1]
    if isinstance(plot, Missing):
        return plot
    curves = list(plot.curves)
    names = Counter(group[0].run.name for group in groups)
    for group in groups:
        labels = {one.label for one in group}
        theirs = [curve for curve in curves if curve.source in labels]
        if len(theirs) < 2 or (count := _common(theirs, plot.by_round)) is None:
            continue
        name = group[0].run.name if names[group[0].run.name] == 1 else group[0].label
        one = _mean_curve(f"{name}, {len(theirs)} seeds", theirs, count, plot.percent)
        curves = [one if curve is theirs[0] else curve for curve in curves if curve not in theirs[1:]]
    if len(curves) == len(plot.curves):
        return plot
    band = f"with its {100 * _CONFIDENCE:.0f} % confidence interval (Student's t) as a band"
    caption = f"{plot.caption} Runs that differ in the seed alone are one curve: their mean, {band}."
    return replace(plot, curves=tuple(curves), caption=caption)


def _groups(runs: Sequence[NamedRun]) -> list[list[NamedRun]]:
    found: dict[str, list[NamedRun]] = {}
    for one in runs:
        found.setdefault(_without_seed(one.run), []).append(one)
    return list(found.values())


def _without_seed(run: Run) -> str:
    kept = {section: values for section, values in run.config.items() if section not in ("seed", *NOT_COMPARED)}
    return json.dumps(kept, sort_keys=True, default=str)


def _common(curves: Sequence[Curve], over_rounds: bool) -> int | None:
    """Number of points that all curves have; None where these do not belong together."""
    lengths = [len(curve.x) for curve in curves]
    count = min(lengths)
    if not count or (max(lengths) > count and curves[0].points is not None):
        return None
    same = all(np.array_equal(curve.x[:count], curves[0].x[:count]) for curve in curves)
    return count if same or not over_rounds else None


def _mean_curve(label: str, curves: Sequence[Curve], count: int, percent: bool) -> Curve:
    """Mean of curves point by point, with the confidence interval of the mean; none where a value is infinite."""
    x, y = (np.array([getattr(curve, axis)[:count] for curve in curves]) for axis in "xy")
    special: Any = import_module("scipy.special")
    spread = np.where(np.isfinite(y), y, np.nan).std(0, ddof=1)
    half = special.stdtrit(len(curves) - 1, (1 + _CONFIDENCE) / 2) * spread / len(curves) ** 0.5
    mean = y.mean(0)
    least, most = 0.0 if (y >= 0).all() else -np.inf, 100.0 if percent else np.inf
    low, high = (np.clip(side, least, most) for side in (mean - half, mean + half))
    mark = None if curves[0].mark is None else int(mean.argmax())
    return replace(curves[0], label=label, x=x.mean(0), y=mean, low=low, high=high, mark=mark, points=None)
