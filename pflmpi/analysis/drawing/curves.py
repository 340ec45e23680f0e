"""Lines and stacked parts."""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pflmpi.analysis.drawing import style
from pflmpi.analysis.plots import Curve, Curves, Stack

_HEIGHT = 4.2  # inches, without the legend
_ROW = 0.22  # inches of a line of the legend
_MANY = 12  # curves; more are drawn thin, without markers, and with fewer points
_MOST_POINTS = 100
_MOST_NAMES = 16  # below the axis
_SMALL = 2.0  # inches of a small drawing
_MOST_APART = 3  # small drawings side by side
_FEW_BARS = 6  # whose names stand upright
_HATCHES = ("", "///", "...", "xxx", "---")


def curves(plot: Curves) -> Figure:
    """Drawing of lines with their bands, the legend below."""
    labels = list(dict.fromkeys(curve.label for curve in plot.curves))
    columns, rows = _legend(labels)
    figure = Figure(figsize=(style.WIDTH, _HEIGHT + _ROW * rows), dpi=style.DPI, layout="constrained")
    axes = figure.add_subplot()
    many = len(plot.curves) > _MANY
    handles: dict[str, Artist] = {}
    for curve in plot.curves:
        shown = slice(None, None, -(-len(curve.x) // _MOST_POINTS)) if many else slice(None)
        (drawn,) = axes.plot(curve.x[shown], curve.y[shown], label=curve.label, **_look(curve, many))
        handles.setdefault(curve.label, drawn)
        _band(axes, curve)
        if curve.mark is not None:
            axes.plot(
                curve.x[curve.mark],
                curve.y[curve.mark],
                marker="o",
                markersize=4 if many else 10,
                markerfacecolor="none",
                markeredgecolor=style.colour(curve.style),
                markeredgewidth=0.8 if many else 1.6,
                linestyle="none",
            )
    if plot.zero:
        axes.axhline(0, color=style.INK, linewidth=0.8)
    if plot.x_log:
        axes.set_xscale("log")
    if plot.x_ticks:
        axes.set_xticks(plot.x_ticks, [str(tick) for tick in plot.x_ticks])
        axes.minorticks_off()
    if plot.x_label == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    if plot.x_names:
        count = len(plot.x_names)
        places = np.linspace(0, count - 1, min(count, _MOST_NAMES)).round().astype(int)
        names = [plot.x_names[place] for place in places]
        axes.set_xticks(places + 1, names, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.grid(color=style.INK, alpha=0.15, linewidth=0.6)
    if labels != [""]:
        figure.legend(handles=handles.values(), labels=list(handles), loc="outside lower center", ncols=columns)
    return figure


def apart(plot: Curves) -> Figure:
    """Small drawings of one line each with its band, on common axes."""
    count = len(plot.curves)
    columns = min(count, _MOST_APART)
    rows = -(-count // columns)
    figure = Figure(figsize=(style.WIDTH, _SMALL * rows + 0.5), dpi=style.DPI, layout="constrained")
    grid = np.asarray(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True))
    for axes, curve in zip(grid.flat, plot.curves, strict=False):
        axes.plot(curve.x, curve.y, color=style.colour(curve.style), linewidth=1.6)
        _band(axes, curve)
        axes.set_title(curve.label)
        axes.grid(color=style.INK, alpha=0.15, linewidth=0.6)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    figure.supxlabel(plot.x_label, fontsize=10)
    figure.supylabel(plot.y_label, fontsize=10)
    return figure


def stack(plot: Stack) -> Figure:
    """Drawing of parts on top of each other, the legend below."""
    figure = Figure(figsize=(style.WIDTH, _HEIGHT + _ROW), dpi=style.DPI, layout="constrained")
    axes = figure.add_subplot()
    bottom = np.zeros(len(plot.x))
    for number, (name, part) in enumerate(plot.parts.items()):
        axes.fill_between(
            plot.x,
            bottom,
            bottom + part,
            step="mid" if len(plot.x) <= _MOST_POINTS else None,
            label=name,
            facecolor=style.colour(number),
            edgecolor=style.INK,
            linewidth=0.3,
            hatch=_HATCHES[number % len(_HATCHES)],
        )
        bottom = bottom + part
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    axes.set_ylim(bottom=0, top=plot.top)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    figure.legend(loc="outside lower center", ncols=_legend(list(plot.parts))[0])
    return figure


def bars(plot: Stack) -> Figure:
    """Drawing of bars of parts on top of each other, the legend below."""
    figure = Figure(figsize=(style.WIDTH, _HEIGHT + _ROW), dpi=style.DPI, layout="constrained")
    axes = figure.add_subplot()
    bottom = np.zeros(len(plot.x))
    for number, (name, part) in enumerate(plot.parts.items()):
        axes.bar(
            plot.x,
            part,
            bottom=bottom,
            width=0.6,
            label=name,
            facecolor=style.colour(number),
            edgecolor=style.INK,
            linewidth=0.3,
            hatch=_HATCHES[number % len(_HATCHES)],
        )
        bottom = bottom + part
    axes.set_xticks(plot.x, plot.names, rotation=30 if len(plot.names) > _FEW_BARS else 0)
    axes.set_ylabel(plot.y_label)
    figure.legend(loc="outside lower center", ncols=_legend(list(plot.parts))[0])
    return figure


def _band(axes: Axes, curve: Curve) -> None:
    """Draw the band of a curve: an area, or a bar for each round where they are one or two."""
    if curve.low is None or curve.high is None:
        return
    known = np.flatnonzero(~np.isnan(curve.low))
    if not len(known):
        return
    colour = style.colour(curve.style)
    x, low, high = curve.x[known], curve.low[known], curve.high[known]
    if len(known) > 2:
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    else:
        axes.vlines(x, low, high, color=colour, linewidth=3, alpha=0.35)


def _look(curve: Curve, many: bool) -> dict[str, Any]:
    look = style.line(curve.style, len(curve.x))
    if curve.thin:
        return {**look, "marker": None, "linewidth": 1.0, "linestyle": ":"}
    return {**look, "marker": None, "linewidth": 0.8} if many else look


def _legend(labels: list[str]) -> tuple[int, int]:
    """Columns and rows of a legend that is not wider than the figure."""
    longest = max((len(label) for label in labels), default=1)
    columns = max(1, min(len(labels), 4, 105 // (longest + 8)))
    return columns, -(-len(labels) // columns)
