"""Figures as plain numbers: drawn by `analysis.drawing`, written as CSV, compared by tests."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from pflmpi.analysis.selection import spread_over
from pflmpi.text import format_csv

Line = Sequence[str | int | float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Plot(ABC):
    """Base of all figures.

    Attributes:
        name: of its files, without an ending.
        title: a few words.
        caption: a description, also for readers who cannot see the figure.
    """

    name: str
    title: str
    caption: str

    @abstractmethod
    def lines(self) -> Iterable[Line]:
        """The header and the lines of the table of everything that is drawn."""

    def table(self, most: int | None = None) -> str:
        """The table as CSV; unknown values are empty. If it has more than so many lines, that of what is drawn."""
        lines = list(islice(self.lines(), None if most is None else most + 1))
        return format_csv(lines if most is None or len(lines) <= most else downsample(self).lines())


@dataclass(frozen=True)
class Missing:
    """A figure that cannot be shown, and why."""

    title: str
    why: str


@dataclass(frozen=True, eq=False)
class Curve:
    """One line of a figure.

    Attributes:
        label: in the legend; curves of one style share it.
        x, y: [n], NaN in y where nothing is known.
        low, high: [n] the band, NaN where there is none; None without a band.
        mark: index of the point that stands out.
        points: [n] the name of each point, such as the client; None where x says it all.
        style: number of colour, line style and marker.
        thin: whether it only accompanies another.
        source: the label of its run, where a figure shows several.
        client: whose curve it is, in a figure that shows one client at a time.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    mark: int | None = None
    points: np.ndarray | None = None
    style: int = 0
    thin: bool = False
    source: str = ""
    client: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Curves(Plot):
    """Lines over a common axis.

    Attributes:
        x_names: what the values 1, 2, ... of x are called, where they are no quantities.
        x_ticks: where the axis has its ticks; none for where they are best.
        zero: whether there is a line at y = 0.
        percent: whether y is a share in percent, of at most 100.
        single_client: whether the curves of one client are shown at a time, which the reader selects.
    """

    x_label: str = "round"
    y_label: str
    curves: tuple[Curve, ...]
    x_log: bool = False
    zero: bool = False
    x_names: tuple[str, ...] = ()
    x_ticks: tuple[int, ...] = ()
    percent: bool = False
    single_client: bool = False

    @property
    def by_round(self) -> bool:
        """Whether x is the number of a round."""
        return self.x_label == "round"

    def lines(self) -> Iterable[Line]:
        yield ("curve", "point", self.x_label, self.y_label, "low", "high", "marked")
        for curve in self.curves:
            nothing = np.full(len(curve.x), np.nan)
            low, high = (nothing if side is None else side for side in (curve.low, curve.high))
            for i, (x, y) in enumerate(zip(curve.x.tolist(), curve.y.tolist(), strict=True)):
                point = (
                    str(curve.points[i]) if curve.points is not None else "" if curve.client is None else curve.client
                )
                yield (curve.label, point, x, y, float(low[i]), float(high[i]), int(i == curve.mark))


@dataclass(frozen=True, eq=False, kw_only=True)
class Stack(Plot):
    """Stacked bars: parts [n] that add up, over x [n].

    Attributes:
        top: where the drawing ends, so that a few high ones do not hide the others; None for the highest.
        names: what the values 0, 1, ... of x are called, where they are no quantities.
        width: how many values of x a bar stands for, from its own on.
    """

    x_label: str
    y_label: str
    x: np.ndarray
    parts: Mapping[str, np.ndarray]
    top: float | None = None
    names: tuple[str, ...] = ()
    width: int = 1

    def lines(self) -> Iterable[Line]:
        yield (self.x_label, *(f"{name} ({self.y_label})" for name in self.parts))
        for i, x in enumerate(self.names or self.x.tolist()):
            yield (x, *(float(part[i]) for part in self.parts.values()))


@dataclass(frozen=True, eq=False)
class Panel:
    """A matrix [R, C] with the names of its rows and columns; NaN where nothing is known."""

    title: str
    values: np.ndarray
    rows: Sequence[str | int]
    columns: Sequence[str | int]

    def drawn_values(self, hide_diagonal: bool) -> np.ndarray:
        """The values [R, C] that are drawn, float64, NaN elsewhere."""
        values = np.array(self.values, np.float64)
        if hide_diagonal:
            np.fill_diagonal(values, np.nan)
        return values


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrices(Plot):
    """Heat maps on one colour scale, or on one each.

    Attributes:
        limits: values of the first and last colour; None for the smallest and largest.
        own_scales: whether each panel has a scale of its own.
        categories: what the values 0, 1, ... are called, where they are no quantities.
        hide_diagonal: whether the diagonal is left out of the drawing and of its scale, because it outshines the rest.
        choices: whether it shows how far the choices of every two clients overlap.
    """

    row_label: str
    column_label: str
    value_label: str
    panels: tuple[Panel, ...]
    limits: tuple[float, float] | None = None
    own_scales: bool = False
    categories: tuple[str, ...] = ()
    hide_diagonal: bool = False
    choices: bool = False

    def lines(self) -> Iterable[Line]:
        yield ("panel", self.row_label, self.column_label, self.value_label)
        for panel in self.panels:
            for row, values in zip(panel.rows, panel.values, strict=True):
                for column, value in zip(panel.columns, values.tolist(), strict=True):
                    yield (panel.title, row, column, value)


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points [n, d], drawn with d = 2, with their classes [n] and clients [n]; client -1 is the server."""

    title: str
    points: np.ndarray
    classes: np.ndarray
    clients: np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class Clouds(Plot):
    """Scatter plots on common axes."""

    x_label: str
    y_label: str
    clouds: tuple[Cloud, ...]

    def lines(self) -> Iterable[Line]:
        yield ("panel", "class", "client (-1: server)", self.x_label, self.y_label)
        for cloud in self.clouds:
            for (x, y), label, client in zip(cloud.points.tolist(), cloud.classes, cloud.clients, strict=True):
                yield (cloud.title, int(label), int(client), x, y)


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars(Plot):
    """Grouped bars: counts by name, of the one client that the reader selects.

    Attributes:
        names: on the axis, in their order.
        bars: client, panel, name, part and count of each.
    """

    x_label: str
    y_label: str
    names: tuple[str, ...]
    bars: tuple[tuple[int, str, str, str, int], ...]

    def lines(self) -> Iterable[Line]:
        yield ("client", "panel", self.x_label, "part", self.y_label)
        yield from self.bars


Part = Curves | Stack | Matrices


@dataclass(frozen=True, eq=False, kw_only=True)
class Multiples(Plot):
    """Small multiples: the same figure of several runs, by the label of the run, on common axes."""

    parts: tuple[tuple[str, Part], ...]

    def lines(self) -> Iterable[Line]:
        for number, (label, part) in enumerate(self.parts):
            for place, line in enumerate(part.lines()):
                if place or not number:
                    yield (label if place else "run", *line)


_MOST_POINTS = 6000  # of all curves of a figure
_MOST_OF_CURVE, _FEWEST_OF_CURVE = 300, 40
_MOST_BARS = 60  # of a stack over rounds
_MOST_CELLS = 3000  # of all matrices of a figure
_MOST_IN_CLOUDS = 3000

_Kind = TypeVar("_Kind", bound=Plot)


def downsample(plot: Plot) -> Plot:
    """The figure downsampled to what is drawn; its caption says what is left out."""
    match plot:
        case Curves():
            most = max(_FEWEST_OF_CURVE, min(_MOST_OF_CURVE, _MOST_POINTS // max(len(plot.curves), 1)))
            if all(len(curve.x) <= most for curve in plot.curves) or plot.single_client:
                return plot
            curves = tuple(_downsample_curve(curve, most) for curve in plot.curves)
            return _add_note(replace(plot, curves=curves), f"At most {most} points of each curve are drawn")
        case Stack() if len(plot.x) > _MOST_BARS and not plot.names:
            size = -(-len(plot.x) // _MOST_BARS)
            starts = np.arange(0, len(plot.x), size)
            counts = np.diff([*starts, len(plot.x)])
            parts = {name: np.add.reduceat(part, starts) / counts for name, part in plot.parts.items()}
            fewer = replace(plot, x=plot.x[starts], parts=parts, width=size)
            return _add_note(fewer, f"Each bar is the mean of {size} rounds")
        case Matrices():
            return _downsample_matrices(plot)
        case Clouds() if (total := sum(len(cloud.classes) for cloud in plot.clouds)) > _MOST_IN_CLOUDS:
            clouds = tuple(_downsample_cloud(cloud, _MOST_IN_CLOUDS / total) for cloud in plot.clouds)
            return _add_note(
                replace(plot, clouds=clouds), f"{_MOST_IN_CLOUDS} of {total} points are drawn, evenly spaced"
            )
        case Multiples():
            fewer_parts: list[tuple[str, Any]] = [
                (label, downsample(replace(part, caption=""))) for label, part in plot.parts
            ]
            notes = dict.fromkeys(part.caption for _, part in fewer_parts if part.caption)
            return replace(plot, parts=tuple(fewer_parts), caption=" ".join([plot.caption, *notes]))
    return plot


def _add_note(plot: _Kind, note: str) -> _Kind:
    return replace(plot, caption=f"{plot.caption} {note}.".strip())


def _downsample_curve(curve: Curve, most: int) -> Curve:
    places = sorted({*spread_over(range(len(curve.x)), most), *([] if curve.mark is None else [curve.mark])})
    parts = {
        name: values[places]
        for name in ("x", "y", "low", "high", "points")
        if (values := getattr(curve, name)) is not None
    }
    return replace(curve, **parts, mark=None if curve.mark is None else places.index(curve.mark))


def _downsample_matrices(plot: Matrices) -> Matrices:
    """Matrices with fewer clients: rows, and the columns where these are clients too."""
    cells = sum(panel.values.size for panel in plot.panels)
    if cells <= _MOST_CELLS:
        return plot
    square = plot.row_label == plot.column_label
    share = (_MOST_CELLS / cells) ** (0.5 if square else 1.0)
    panels = []
    for panel in plot.panels:
        rows = spread_over(range(len(panel.rows)), max(2, int(len(panel.rows) * share)))
        if len(plot.panels) == 1 and not square and len(known := np.flatnonzero(~np.isnan(panel.values).all(1))):
            rows = spread_over(known.tolist(), len(rows))
        columns = rows if square else list(range(len(panel.columns)))
        names = [panel.rows[row] for row in rows], [panel.columns[column] for column in columns]
        panels.append(Panel(panel.title, panel.values[np.ix_(rows, columns)], *names))
    count, most = (max(len(panel.rows) for panel in several) for several in (panels, plot.panels))
    note = f"{count} of {most} {plot.row_label}s are drawn, evenly spaced"
    return _add_note(replace(plot, panels=tuple(panels)), note)


def _downsample_cloud(cloud: Cloud, share: float) -> Cloud:
    places = spread_over(range(len(cloud.classes)), max(1, int(share * len(cloud.classes))))
    return Cloud(cloud.title, cloud.points[places], cloud.classes[places], cloud.clients[places])
