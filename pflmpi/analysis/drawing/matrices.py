"""Matrices as coloured cells."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap, Normalize
from matplotlib.figure import Figure

from pflmpi.analysis.drawing import style
from pflmpi.analysis.plots import Matrices, Panel

_MOST_COLUMNS = 3  # panels side by side
_MOST_TICKS = 12
_CELL = 0.17  # inches of a row of cells, between the limits below
_LEAST, _MOST = 2.4, 6.0


def matrices(plot: Matrices) -> Figure:
    """Drawing of one or several matrices with a common scale of colours on the right."""
    count = len(plot.panels)
    columns = 2 if count == 4 else min(count, _MOST_COLUMNS)
    rows = -(-count // columns)
    height = float(np.clip(_CELL * max(len(panel.rows) for panel in plot.panels), _LEAST, _MOST / rows**0.5))
    figure = Figure(figsize=(style.WIDTH, rows * height + 0.8), dpi=style.DPI, layout="constrained")
    grid = np.asarray(figure.subplots(rows, columns, squeeze=False))
    shown = [_shown(panel, plot.hide_diagonal) for panel in plot.panels]
    norm, colours = _scale(plot, shown)
    image = None
    for axes, panel, values in zip(grid.flat, plot.panels, shown, strict=False):
        image = axes.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="none")
        axes.set_title(panel.title)
        _ticks(axes, panel)
        axes.spines[["top", "right"]].set_visible(True)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(plot.row_label)
    for number, axes in enumerate(grid.flat[:count]):
        if number + columns >= count:
            axes.set_xlabel(plot.column_label)
    assert image is not None, "a figure without panels"
    bar = figure.colorbar(image, ax=grid.ravel().tolist(), label=plot.value_label)
    if plot.categories:
        bar.set_ticks(range(len(plot.categories)), labels=list(plot.categories))
    return figure


def _shown(panel: Panel, hide_diagonal: bool) -> np.ndarray:
    values = np.array(panel.values, np.float64)
    if hide_diagonal:
        np.fill_diagonal(values, np.nan)
    return values


def _scale(plot: Matrices, shown: list[np.ndarray]) -> tuple[Normalize, ListedColormap]:
    if plot.categories:
        count = len(plot.categories)
        steps = colormaps[style.SEQUENTIAL](np.linspace(style.DARKEST, 1, count))
        return BoundaryNorm(np.arange(count + 1) - 0.5, count), ListedColormap(steps)
    known = np.concatenate([values[np.isfinite(values)] for values in shown])
    low, high = plot.limits or ((known.min(), known.max()) if len(known) else (0.0, 1.0))
    scale = colormaps[style.SEQUENTIAL](np.linspace(style.DARKEST, 1, 256))
    return Normalize(low, high if high > low else low + 1), ListedColormap(scale)


def _ticks(axes: Axes, panel: Panel) -> None:
    """Name as many rows and columns as there is room for."""
    for axis, names, room in ((axes.xaxis, panel.columns, 8), (axes.yaxis, panel.rows, _MOST_TICKS)):
        every = -(-len(names) // room)
        places = list(range(0, len(names), every))
        axis.set_ticks(places, labels=[str(names[place]) for place in places])
