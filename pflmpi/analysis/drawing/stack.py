"""Parts on top of each other."""

from dataclasses import replace

import numpy as np

from pflmpi.analysis.drawing import style
from pflmpi.analysis.drawing.frame import Axis, Frame, limits, named
from pflmpi.analysis.drawing.scene import Boxes, Key, Shape
from pflmpi.analysis.plots import Stack

_BAR = 0.6  # of the room of a bar with a name


def axes(plot: Stack) -> tuple[Axis, Axis]:
    """Axes on which all parts have room, but for what the figure cuts off."""
    top = plot.top or float(max(np.sum(list(plot.parts.values()), axis=0), default=0.0)) or 1.0
    if plot.names:
        return named(plot.x_label, plot.names), Axis(label=plot.y_label, low=0.0, high=1.04 * top)
    x = limits(plot.x_label, [plot.x - 0.5, plot.x + 0.5], padding=0)
    return replace(x, whole=True), Axis(label=plot.y_label, low=0.0, high=1.04 * top)


def shapes(plot: Stack, drawn: Frame) -> list[Shape]:
    """A box for each part of each value of x, the first at the bottom."""
    found: list[Shape] = []
    x, half = (plot.x + 1, _BAR / 2) if plot.names else (plot.x, 0.5)
    bottom = np.zeros(len(plot.x))
    for number, part in enumerate(plot.parts.values()):
        low, high = (np.minimum(height, drawn.y.high) for height in (bottom, bottom + part))
        starts, ends = drawn.places(x - half, high), drawn.places(x + half, low)
        boxes = np.concatenate([starts, ends - starts], 1)
        found.append(Boxes(boxes=boxes[boxes[:, 3] > 0], colour=style.colour(number)))
        bottom = bottom + part
    return found


def hover(plot: Stack) -> dict[str, list[float]]:
    """The values of x and of each part, as a pointer says them."""
    columns = {plot.x_label: plot.x + 1 if plot.names else plot.x, **plot.parts}
    return {name: [float(f"{value:.4g}") for value in values.tolist()] for name, values in columns.items()}


def keys(plot: Stack) -> tuple[Key, ...]:
    """The legend of parts."""
    return tuple(Key(label=name, colour=style.colour(number), shape="s") for number, name in enumerate(plot.parts))
