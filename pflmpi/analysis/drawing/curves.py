"""Lines with their bands."""

from dataclasses import replace

import numpy as np

from pflmpi.analysis.drawing import style
from pflmpi.analysis.drawing.frame import Axis, Frame, limits, named
from pflmpi.analysis.drawing.scene import Area, Key, Line, Marks, Shape
from pflmpi.analysis.plots import Curve, Curves

_MANY = 12  # curves; more are drawn thin, without marks, and with fewer points
_MOST_POINTS = 100


def axes(plot: Curves) -> tuple[Axis, Axis]:
    """Axes on which all curves of a figure have room."""
    sides = [side for curve in plot.curves for side in (curve.y, curve.low, curve.high) if side is not None]
    x = limits(plot.x_label, [curve.x for curve in plot.curves], plot.x_log, 0.02)
    if plot.x_names:
        x = named(plot.x_label, plot.x_names)
    y = limits(plot.y_label, [*sides, np.zeros(1)] if plot.zero else sides)
    return replace(x, whole=plot.by_round, ticks=plot.x_ticks), y


def shapes(plot: Curves, drawn: Frame) -> list[Shape]:
    """The curves of a figure on their axes, bands below lines."""
    many = len(plot.curves) > _MANY
    ends = np.array([drawn.x.low, drawn.x.high])
    found: list[Shape] = [Line(points=drawn.places(ends, np.zeros(2)))] if plot.zero else []
    for curve in plot.curves:
        found += _band(drawn, curve)
    for curve in plot.curves:
        found += _line(drawn, curve, many)
    return found


def keys(plot: Curves) -> tuple[Key, ...]:
    """The legend: an entry for each label."""
    firsts = {curve.label: curve for curve in reversed(plot.curves)}
    labels = dict.fromkeys(curve.label for curve in plot.curves)
    return tuple(
        Key(label=label, colour=style.colour(firsts[label].style), dash=_dash(firsts[label]))
        for label in labels
        if label
    )


def _line(drawn: Frame, curve: Curve, many: bool) -> list[Shape]:
    shown = slice(None, None, -(-len(curve.x) // _MOST_POINTS)) if many else slice(None)
    places = drawn.places(curve.x, curve.y)
    names = [] if curve.points is None else [str(name) for name in curve.points[shown]]
    colour, dash = style.colour(curve.style), _dash(curve)
    thin = many or curve.thin
    found: list[Shape] = [
        Line(
            points=places[shown],
            colour=colour,
            dash=dash,
            width=1.0 if thin else 1.8,
            label=curve.label or drawn.y.label,
            names=names,
        )
    ]
    shape, every = style.mark(curve.style, len(curve.x))
    if not thin:
        found.append(Marks(points=places[curve.style % every :: every], colour=colour, shape=shape))
    elif len(curve.x) == 1:
        found.append(Marks(points=places, colour=colour, shape=shape, radius=2.0))
    if curve.mark is not None:
        place = places[curve.mark : curve.mark + 1]
        found.append(Marks(points=place, colour=colour, radius=2.0 if many else 6.0, hollow=True))
    return found


def _band(drawn: Frame, curve: Curve) -> list[Shape]:
    """The band of a curve: an area, or a bar for each round where they are one or two."""
    if curve.low is None or curve.high is None:
        return []
    known = np.flatnonzero(~np.isnan(curve.low))
    low, high = (drawn.places(curve.x[known], side[known]) for side in (curve.low, curve.high))
    colour = style.colour(curve.style)
    if len(known) > 2:
        return [Area(points=np.concatenate([low, high[::-1]]), colour=colour, opacity=0.18)]
    return [Line(points=np.stack(pair), colour=colour, width=4, opacity=0.35) for pair in zip(low, high, strict=True)]


def _dash(curve: Curve) -> tuple[float, ...]:
    return (1.5, 3) if curve.thin else style.dash(curve.style)
