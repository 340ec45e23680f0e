"""Accuracy over rounds, bytes and seconds."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pflmpi.analysis.plots import Curve, Curves, Missing
from pflmpi.analysis.run import Run
from pflmpi.analysis.series.selection import NamedRun, spread_over
from pflmpi.errors import CheckpointError
from pflmpi.text import scaled_bytes

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


def accuracy_against_bytes(runs: Sequence[NamedRun]) -> Curves | Missing:
    """Accuracy against the logical bytes sent so far, up and down."""
    title = "Accuracy against bytes"
    moved = [np.cumsum(one.run.columns["up_bytes"] + one.run.columns["down_bytes"]) for one in runs]
    silent = [one.label for one, total in zip(runs, moved, strict=True) if not total.any()]
    chosen = [(one, total) for one, total in zip(runs, moved, strict=True) if total.any() and evaluated(one.run).any()]
    if not chosen:
        return Missing(title, "nothing was sent by these runs, or no round has been evaluated yet")
    divisor, unit = scaled_bytes(max(float(total[-1]) for _, total in chosen))
    caption = "Logical bytes, up and down, of all clients from the first round on: what the messages hold."
    if silent:
        caption += f" Not drawn, as nothing is sent: {', '.join(silent[:5])}{' and others' * (len(silent) > 5)}."
    least, most = (f(float(total[-1]) for _, total in chosen) for f in (min, max))
    return Curves(
        name="accuracy_against_bytes",
        title=title,
        caption=caption,
        x_label=f"sent so far, up and down ({unit})",
        y_label="accuracy, mean over clients (%)",
        curves=tuple(_against(one, total / divisor) for one, total in chosen),
        x_log=most > 20 * least,
        percent=True,
    )


def accuracy_against_seconds(runs: Sequence[NamedRun]) -> Curves | Missing:
    """Accuracy against the seconds of all rounds so far."""
    title = "Accuracy against time"
    chosen = [one for one in runs if evaluated(one.run).any()]
    if not chosen:
        return Missing(title, "no round has been evaluated yet")
    times = [np.cumsum(one.run.columns["seconds"]) for one in chosen]
    least, most = (f(float(time[-1]) for time in times) for f in (min, max))
    return Curves(
        name="accuracy_against_seconds",
        title=title,
        caption="Seconds of the rounds added up, as rank 0 measured them; starting and waiting between two runs of one "
        "folder are not in them. Only times from the same machine and number of ranks can be compared.",
        x_label="time in rounds (s)",
        y_label="accuracy, mean over clients (%)",
        curves=tuple(_against(one, time) for one, time in zip(chosen, times, strict=True)),
        x_log=most > 20 * least,
        percent=True,
    )


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


def _against(one: NamedRun, x: np.ndarray) -> Curve:
    seen = evaluated(one.run)
    mean = 100 * one.run.columns["accuracy_mean"][seen]
    return Curve(one.legend, x[seen], mean, mark=int(np.nanargmax(mean)), style=one.style, source=one.label)
