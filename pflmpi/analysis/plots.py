"""Figures as plain numbers, which `analysis.drawing` draws and which are written as CSV."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from pflmpi.analysis.selection import pick_evenly_spaced
from pflmpi.text import format_csv, pluralize

Line = Sequence[str | int | float]

_NAME = re.compile("[a-z0-9_-]+")  # of a figure


@dataclass(frozen=True, eq=False, kw_only=True)
class Plot(ABC):
    """Base of all figures."""

    name: str  # name of its files, without a suffix
    title: str  # a few words
    caption: str  # a description, also for readers who cannot see the figure

    @abstractmethod
    def lines(self) -> Iterable[Line]:
        """The header and the rows of the table of all values."""

    def table(self, most: int | None = None) -> str:
        """The table as CSV; unknown values are empty. With more than `most` lines it is that of the drawn points."""
        lines = list(islice(self.lines(), None if most is None else most + 1))
        return format_csv(lines if most is None or len(lines) <= most else downsample(self).lines())


@dataclass(frozen=True)
class Missing:
    """A figure that cannot be drawn, and why."""

    title: str
    why: str


def make_names_unique(figures: Iterable[Plot | Missing]) -> Iterator[Plot | Missing]:
    """Appends a number to repeated names of figures, because names become file names and keys."""
    counts = Counter[str]()
    for figure in figures:
        if isinstance(figure, Missing):
            yield figure
            continue
        assert _NAME.fullmatch(figure.name), figure.name
        counts[figure.name] += 1
        count = counts[figure.name]
        yield replace(figure, name=f"{figure.name}-{count}") if count > 1 else figure


@dataclass(frozen=True, eq=False)
class Curve:
    """One line of a figure.

    Attributes:
        label: entry of the legend; curves of one style share it.
        x, y: [n], y is NaN where it is unknown.
        low, high: [n] a band around y, NaN where there is none; None without a band.
        mark: index of a highlighted point.
        points: [n] the name of each point, such as the client; None if x identifies it.
        rounds: [n] the round of each point, where x is what was spent up to it.
        style: index of the colour and line style.
        thin: draw it dotted, as an auxiliary line.
        source: the label of its run, if a figure shows several.
        client: its client, in a figure that shows one client at a time.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    mark: int | None = None
    points: np.ndarray | None = None
    rounds: np.ndarray | None = None
    style: int = 0
    thin: bool = False
    source: str = ""
    client: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Curves(Plot):
    """Lines over a common axis."""

    x_label: str = "round"
    y_label: str
    curves: tuple[Curve, ...]
    x_log: bool = False
    zero: bool = False  # whether the y axis includes 0
    x_names: tuple[str, ...] = ()  # names of the values 1, 2, ... of x, if x is a category
    x_ticks: tuple[int, ...] = ()  # positions of the ticks; empty to choose them automatically
    percent: bool = False  # whether y is a percentage of at most 100
    single_client: bool = False  # show only the curves of the client that the reader selects

    @property
    def by_round(self) -> bool:
        """Whether x is the number of a round."""
        return self.x_label == "round"

    def lines(self) -> Iterable[Line]:
        yield ("curve", "point", self.x_label, self.y_label, "low", "high", "marked")
        for curve in self.curves:
            unknown = np.full(len(curve.x), np.nan)
            low, high = (unknown if side is None else side for side in (curve.low, curve.high))
            for i, (x, y) in enumerate(zip(curve.x.tolist(), curve.y.tolist(), strict=True)):
                point: str | int = "" if curve.client is None else curve.client
                if curve.points is not None:
                    point = str(curve.points[i])
                name = self.x_names[int(x) - 1] if self.x_names else x
                yield (curve.label, point, name, y, float(low[i]), float(high[i]), int(i == curve.mark))


@dataclass(frozen=True, eq=False, kw_only=True)
class Stack(Plot):
    """Stacked bars: parts [n] that add up, over x [n].

    Attributes:
        top: upper end of the y axis, so that a few high bars do not dwarf the others; None for automatic.
        names: names of the values 0, 1, ... of x, if x is a category.
        width: number of consecutive values of x that a bar covers, beginning with its own.
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
    """A matrix [R, C] with the names of its rows and columns; NaN where a value is unknown."""

    title: str
    values: np.ndarray
    rows: Sequence[str | int]
    columns: Sequence[str | int]

    def drawn_values(self, hide_diagonal: bool) -> np.ndarray:
        """The values [R, C] as float64, with NaN on the diagonal if it is hidden."""
        values = np.array(self.values, np.float64)
        if hide_diagonal:
            np.fill_diagonal(values, np.nan)
        return values


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrices(Plot):
    """Heat maps with a shared colour scale, or with one each.

    Attributes:
        limits: values of the first and last colour; None for the smallest and largest value.
        own_scales: whether each panel has its own colour scale.
        categories: names of the values 0, 1, ..., if they are categories.
        hide_diagonal: leave out the diagonal and ignore it in the colour scale, because its values dominate.
        choices: whether values are overlaps between the choices of two clients.
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
    class_names: tuple[str, ...] = ()  # [K]; () if they have none

    def name_class(self, label: int) -> str:
        """Returns the name of a class, or else its number."""
        return self.class_names[label] if label < len(self.class_names) else str(label)

    def lines(self) -> Iterable[Line]:
        yield ("panel", "class", "client (-1: server)", self.x_label, self.y_label)
        for cloud in self.clouds:
            for (x, y), label, client in zip(cloud.points.tolist(), cloud.classes, cloud.clients, strict=True):
                yield (cloud.title, self.name_class(int(label)), int(client), x, y)


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars(Plot):
    """Grouped bars: counts by name, for the client that the reader selects."""

    x_label: str
    y_label: str
    names: tuple[str, ...]  # names on the axis, in order
    bars: tuple[tuple[int, str, str, str, int], ...]  # client, panel, name, part and count of each bar

    def lines(self) -> Iterable[Line]:
        yield ("client", "panel", self.x_label, "part", self.y_label)
        yield from self.bars


Part = Curves | Stack | Matrices


@dataclass(frozen=True, eq=False, kw_only=True)
class Multiples(Plot):
    """Small multiples: the same figure for several runs, by the label of the run, on common axes."""

    parts: tuple[tuple[str, Part], ...]

    def lines(self) -> Iterable[Line]:
        for number, (label, part) in enumerate(self.parts):
            for place, line in enumerate(part.lines()):
                if place or not number:
                    yield (label if place else "run", *line)


# Upper limits of what is drawn in one figure.
_MOST_POINTS = 6000  # of all curves together
_MOST_OF_CURVE, _FEWEST_OF_CURVE = 300, 40  # points
_MOST_BARS = 60
_MOST_CELLS = 3000  # of all matrices together
_MOST_IN_CLOUDS = 3000  # points

_Kind = TypeVar("_Kind", bound=Plot)


def downsample(plot: Plot) -> Plot:
    """Downsamples a figure to what is drawn; its caption says what is left out."""
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
            downsampled: list[tuple[str, Any]] = [
                (label, downsample(replace(part, caption=""))) for label, part in plot.parts
            ]
            notes = dict.fromkeys(part.caption for _, part in downsampled if part.caption)
            return replace(plot, parts=tuple(downsampled), caption=" ".join([plot.caption, *notes]))
    return plot


def _add_note(plot: _Kind, note: str) -> _Kind:
    return replace(plot, caption=f"{plot.caption} {note}.".strip())


def _downsample_curve(curve: Curve, most: int) -> Curve:
    """Keeps at most `most` evenly spaced points, and the highlighted one."""
    marked = [] if curve.mark is None else [curve.mark]
    indices = sorted({*pick_evenly_spaced(range(len(curve.x)), most), *marked})
    return replace(keep_points(curve, indices), mark=None if curve.mark is None else indices.index(curve.mark))


def keep_points(curve: Curve, indices: Sequence[int] | np.ndarray) -> Curve:
    """The curve at the points of these indices, or of a mask; none is highlighted."""
    arrays = {
        name: values[indices]
        for name in ("x", "y", "low", "high", "points", "rounds")
        if (values := getattr(curve, name)) is not None
    }
    return replace(curve, **arrays, mark=None)


def _downsample_matrices(plot: Matrices) -> Matrices:
    """Keeps evenly spaced rows; where the columns begin with the rows, as in pairs of clients, columns too."""
    cells = sum(panel.values.size for panel in plot.panels)
    if cells <= _MOST_CELLS:
        return plot
    pairs = all([*panel.columns[: len(panel.rows)]] == [*panel.rows] for panel in plot.panels)
    share = (_MOST_CELLS / cells) ** (0.5 if pairs else 1.0)
    panels = []
    for panel in plot.panels:
        candidates = list(range(len(panel.rows)))
        count = min(len(candidates), max(2, int(len(candidates) * share)))
        if len(plot.panels) == 1 and not pairs:  # rather rows with a value
            candidates = np.flatnonzero(~np.isnan(panel.values).all(1)).tolist() or candidates
        rows = pick_evenly_spaced(candidates, count)
        columns = list(range(len(panel.columns)))
        if pairs:  # the diagonal stays one
            others = columns[len(panel.rows) :]
            columns = [*rows, *pick_evenly_spaced(others, int(len(others) * share))]
        names = [panel.rows[row] for row in rows], [panel.columns[column] for column in columns]
        panels.append(Panel(panel.title, panel.values[np.ix_(rows, columns)], *names))
    drawn, total = (max(len(panel.rows) for panel in side) for side in (panels, plot.panels))
    note = f"{drawn} of {pluralize(total, plot.row_label)} are drawn, evenly spaced"
    return _add_note(replace(plot, panels=tuple(panels)), note)


def _downsample_cloud(cloud: Cloud, share: float) -> Cloud:
    indices = pick_evenly_spaced(range(len(cloud.classes)), max(1, int(share * len(cloud.classes))))
    return Cloud(cloud.title, cloud.points[indices], cloud.classes[indices], cloud.clients[indices])
