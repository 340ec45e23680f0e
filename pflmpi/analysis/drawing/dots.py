"""Dots in rows, one row for each name."""

import numpy as np

from pflmpi.analysis.drawing import style
from pflmpi.analysis.drawing.frame import Axis, Frame, limits, named
from pflmpi.analysis.drawing.scene import Key, Line, Marks, Shape
from pflmpi.analysis.plots import Dots

_ROW = 15.0  # pixels
_LOWEST, _HIGHEST = 120.0, 900.0
_SPREAD = 0.6  # of a row, so that equal values do not hide each other


def height(plot: Dots) -> float:
    """Pixels of the rows."""
    return float(np.clip(_ROW * len(plot.rows), _LOWEST, _HIGHEST))


def axes(plot: Dots) -> tuple[Axis, Axis]:
    """The values, and the rows from the top."""
    return limits(plot.x_label, [*plot.series.values(), np.zeros(1)]), named(plot.row_label, plot.rows, downwards=True)


def shapes(plot: Dots, drawn: Frame) -> list[Shape]:
    """A line at zero, one for each row, and the dots."""
    rows = np.arange(1, len(plot.rows) + 1)
    ends = np.array([drawn.y.low, drawn.y.high])
    found: list[Shape] = [Line(points=drawn.places(np.zeros(2), ends))]
    for _, place in drawn.places(np.full(len(rows), drawn.x.low), rows):
        found.append(Line(points=np.array([[drawn.left, place], [drawn.right, place]]), opacity=0.08))
    apart = _SPREAD / len(plot.series)
    for position, (number, (label, values)) in enumerate(zip(plot.styles, plot.series.items(), strict=True)):
        points = drawn.places(values, rows + apart * (position - (len(plot.series) - 1) / 2))
        shape, _ = style.mark(number, 1)
        found.append(Marks(points=points, colour=style.colour(number), shape=shape, label=label, names=plot.rows))
    return found


def keys(plot: Dots) -> tuple[Key, ...]:
    """The legend: an entry for each series."""
    return tuple(
        Key(label=label, colour=style.colour(number), shape=style.mark(number, 1)[0])
        for number, label in zip(plot.styles, plot.series, strict=True)
    )
