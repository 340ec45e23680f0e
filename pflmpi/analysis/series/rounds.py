"""What each round of one run sends and how long it takes, from its metrics alone."""

import numpy as np

from pflmpi.analysis.plots import Curve, Curves, Missing, Stack
from pflmpi.analysis.series.selection import Shown
from pflmpi.analysis.units import scaled_bytes

_HIGH = 4  # times what most rounds take: rounds above that are cut off in the drawing
_KINDS = {"up": "up_bytes", "down": "down_bytes", "up, wire": "wire_up_bytes", "down, wire": "wire_down_bytes"}


def bytes_per_round(one: Shown) -> Curves | Missing:
    """Return the bytes up and down in each round, logical and wire."""
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
    )


def seconds_per_round(one: Shown) -> Stack | Missing:
    """Return the seconds of each round on rank 0, in parts that add up to the round."""
    title = "Time per round"
    columns = one.run.columns
    if not len(columns["round"]):
        return Missing(title, "no round is complete yet")
    exchange, evaluation = columns["exchange_seconds"], columns["evaluation_seconds"]
    parts = {
        "computation, and the rest of the round": np.maximum(columns["seconds"] - exchange - evaluation, 0.0),
        "communication": exchange,
        "evaluation": evaluation,
    }
    whole = np.sum(list(parts.values()), axis=0)
    usual = float(np.quantile(whole, 0.9))
    high = whole > _HIGH * usual
    cut = [f"{number} ({seconds:.1f} s)" for number, seconds in zip(columns["round"][high], whole[high], strict=True)]
    return Stack(
        name="seconds_per_round",
        title=title,
        caption="As rank 0 measured it: communication has the wait for messages of other ranks; what is neither it nor "
        "evaluation is computation. Checkpoints are written beside the training, and their time is not recorded."
        + (f" Cut off at the top: round {', '.join(cut)}." if cut else ""),
        x_label="round",
        y_label="time (s)",
        x=columns["round"],
        parts=parts,
        top=1.5 * usual if cut else None,
    )
