"""As many points of a figure as are drawn: evenly spaced, or means; the captions say so, and the CSV has all."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from pflmpi.analysis.plots import Cloud, Clouds, Curve, Curves, Dots, Matrices, Multiples, Panel, Plot, Stack
from pflmpi.analysis.selection import spread_over

_MOST_POINTS = 6000  # of all curves of a figure
_MOST_OF_CURVE, _FEWEST_OF_CURVE = 300, 40
_MOST_BARS = 60  # of a stack over rounds
_MOST_CELLS = 3000  # of all matrices of a figure
_MOST_ROWS = 60  # of dots
_MOST_IN_CLOUDS = 3000

_Kind = TypeVar("_Kind", bound=Plot)


def thinned(plot: Plot) -> Plot:
    """The figure with as many points as are drawn; its caption says what is left out."""
    match plot:
        case Curves():
            most = max(_FEWEST_OF_CURVE, min(_MOST_OF_CURVE, _MOST_POINTS // max(len(plot.curves), 1)))
            if all(len(curve.x) <= most for curve in plot.curves) or plot.single_client:
                return plot
            curves = tuple(_some_points(curve, most) for curve in plot.curves)
            return _noted(replace(plot, curves=curves), f"At most {most} points of each curve are drawn")
        case Stack() if len(plot.x) > _MOST_BARS and not plot.names:
            size = -(-len(plot.x) // _MOST_BARS)
            starts = np.arange(0, len(plot.x), size)
            counts = np.diff([*starts, len(plot.x)])
            parts = {name: np.add.reduceat(part, starts) / counts for name, part in plot.parts.items()}
            fewer = replace(plot, x=plot.x[starts], parts=parts, width=size)
            return _noted(fewer, f"Each bar is the mean of {size} rounds")
        case Matrices():
            return _some_rows(plot)
        case Dots() if len(plot.rows) > _MOST_ROWS:
            places = spread_over(range(len(plot.rows)), _MOST_ROWS)
            rows = tuple(plot.rows[place] for place in places)
            clients = tuple(plot.clients[place] for place in places)
            series = {label: values[places] for label, values in plot.series.items()}
            fewer_rows = replace(plot, rows=rows, clients=clients, series=series)
            return _noted(
                fewer_rows, f"{_MOST_ROWS} of {len(plot.rows)} clients are drawn, evenly spaced in this order"
            )
        case Clouds() if (total := sum(len(cloud.classes) for cloud in plot.clouds)) > _MOST_IN_CLOUDS:
            clouds = tuple(_some_of_cloud(cloud, _MOST_IN_CLOUDS / total) for cloud in plot.clouds)
            return _noted(replace(plot, clouds=clouds), f"{_MOST_IN_CLOUDS} of {total} points are drawn, evenly spaced")
        case Multiples():
            fewer_parts: list[tuple[str, Any]] = [
                (label, thinned(replace(part, caption=""))) for label, part in plot.parts
            ]
            notes = dict.fromkeys(part.caption for _, part in fewer_parts if part.caption)
            return replace(plot, parts=tuple(fewer_parts), caption=" ".join([plot.caption, *notes]))
    return plot


def _noted(plot: _Kind, note: str) -> _Kind:
    return replace(plot, caption=f"{plot.caption} {note}; the CSV has all.".strip())


def _some_points(curve: Curve, most: int) -> Curve:
    places = sorted({*spread_over(range(len(curve.x)), most), *([] if curve.mark is None else [curve.mark])})
    parts = {
        name: values[places]
        for name in ("x", "y", "low", "high", "points")
        if (values := getattr(curve, name)) is not None
    }
    return replace(curve, **parts, mark=None if curve.mark is None else places.index(curve.mark))


def _some_rows(plot: Matrices) -> Matrices:
    """Matrices with fewer clients: rows, and the columns where these are clients too."""
    cells = sum(panel.values.size for panel in plot.panels)
    if cells <= _MOST_CELLS:
        return plot
    square = plot.row_label == plot.column_label
    share = (_MOST_CELLS / cells) ** (0.5 if square else 1.0)
    panels = []
    for panel in plot.panels:
        rows = spread_over(range(len(panel.rows)), max(2, int(len(panel.rows) * share)))
        columns = rows if square else list(range(len(panel.columns)))
        panels.append(
            Panel(
                panel.title,
                panel.values[np.ix_(rows, columns)],
                [panel.rows[row] for row in rows],
                [panel.columns[column] for column in columns],
            )
        )
    count, most = (max(len(panel.rows) for panel in several) for several in (panels, plot.panels))
    drawn: Matrices = _noted(
        replace(plot, panels=tuple(panels)), f"{count} of {most} {plot.row_label}s are drawn, evenly spaced"
    )
    return drawn


def _some_of_cloud(cloud: Cloud, share: float) -> Cloud:
    places = spread_over(range(len(cloud.classes)), max(1, int(share * len(cloud.classes))))
    return Cloud(cloud.title, cloud.points[places], cloud.classes[places], cloud.clients[places])
