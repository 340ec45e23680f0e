"""What runs cost: bytes and seconds of rounds, and accuracy against them."""

from collections.abc import Sequence

import numpy as np

from pflmpi.analysis.plots import Curve, Curves, Missing, Stack
from pflmpi.analysis.selection import NamedRun
from pflmpi.analysis.series.accuracy import evaluated
from pflmpi.text import scaled_bytes


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


def _against(one: NamedRun, x: np.ndarray) -> Curve:
    seen = evaluated(one.run)
    mean = 100 * one.run.columns["accuracy_mean"][seen]
    return Curve(one.legend, x[seen], mean, mark=int(np.nanargmax(mean)), style=one.style, source=one.label)


_HIGH = 4  # times what most rounds take: rounds above that are cut off in the drawing
_PARTS = {
    "communication": "exchange_seconds",
    "evaluation": "evaluation_seconds",
    "checkpoint": "checkpoint_seconds",
}
_KINDS = {"up": "up_bytes", "down": "down_bytes", "up, wire": "wire_up_bytes", "down, wire": "wire_down_bytes"}


def bytes_per_round(one: NamedRun) -> Curves | Missing:
    """Bytes up and down in each round, logical and wire."""
    title = "Bytes per round"
    columns = one.run.columns
    if not any(columns[name].any() for name in _KINDS.values()):
        return Missing(title, f"{one.label} sends nothing")
    divisor, unit = scaled_bytes(max(float(columns[name].max()) for name in _KINDS.values()))
    moved = [(name, column) for name, column in _KINDS.items() if columns[column].any()]
    return Curves(
        name="bytes_per_round",
        title=title,
        caption="Up is what goes to the server, down what comes from it: logical bytes, what the messages hold. Wire: "
        "what the collectives moved between ranks; not drawn where it is nothing, as with one rank.",
        x_label="round",
        y_label=f"sent in a round ({unit})",
        curves=tuple(
            Curve(name, columns["round"], columns[column] / divisor, style=style)
            for style, (name, column) in enumerate(moved)
        ),
        zero=True,
        by_round=True,
    )


def seconds_per_round(one: NamedRun) -> Stack | Missing:
    """Seconds of each round on rank 0, in parts that add up to the round."""
    title = "Time per round"
    columns = one.run.columns
    if not len(columns["round"]):
        return Missing(title, "no round is complete yet")
    parts = {name: np.nan_to_num(columns[column]) for name, column in _PARTS.items() if column in columns}
    rest = columns["seconds"] - np.sum(list(parts.values()), axis=0)
    parts = {"computation, and the rest of the round": np.maximum(rest, 0.0), **parts}
    known = not np.isnan(columns.get("checkpoint_seconds", np.array(np.nan))).any()
    whole = np.sum(list(parts.values()), axis=0)
    usual = float(np.quantile(whole, 0.9))
    high = whole > _HIGH * usual
    cut = [f"{number} ({seconds:.1f} s)" for number, seconds in zip(columns["round"][high], whole[high], strict=True)]
    return Stack(
        name="seconds_per_round",
        title=title,
        caption="Measured on rank 0; evaluation is the mean of the ranks that compute. Communication includes the wait "
        "for other ranks; checkpoint is the time for which "
        "training stopped for the checkpoint before the round, which is written in the background; the rest is "
        "computation."
        + ("" if known else " Some rounds were run before the time of checkpoints was recorded.")
        + (f" Cut off at the top: round {', '.join(cut)}." if cut else ""),
        x_label="round",
        y_label="time (s)",
        x=columns["round"],
        parts=parts,
        top=1.5 * usual if cut else None,
    )


def imbalance(one: NamedRun) -> list[Curves]:
    """Seconds that the slowest rank computes in each round, and the mean of the ranks; none where there is one rank."""
    columns = one.run.columns
    waiting = np.nan_to_num(columns.get("waiting_seconds", np.zeros(0)))
    if not waiting.any():
        return []
    slowest = columns["compute_seconds"]
    over = float(slowest.sum() / (slowest - waiting).sum())
    plot = Curves(
        name="imbalance",
        title="Balance of ranks",
        caption="Seconds of training and testing: of the slowest rank, and the mean of the ranks that compute, which "
        f"wait for it. Over all rounds the slowest has {over:.2f} times the mean.",
        x_label="round",
        y_label="time (s)",
        curves=(
            Curve("slowest rank", columns["round"], slowest),
            Curve("mean", columns["round"], slowest - waiting, style=1),
        ),
        zero=True,
        by_round=True,
    )
    return [plot]
