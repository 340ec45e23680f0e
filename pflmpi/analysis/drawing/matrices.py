"""Matrices as coloured cells."""

import base64
from collections.abc import Sequence

import numpy as np

from pflmpi.analysis.drawing import style
from pflmpi.analysis.drawing.frame import Frame, frame, named
from pflmpi.analysis.drawing.scene import Boxes, Cells, ColourScale, Key, Scene, Shape
from pflmpi.analysis.drawing.ticks import texts
from pflmpi.analysis.plots import Matrices, Panel

_CELL = 14.0  # pixels of a row, between the limits below
_LOWEST, _HIGHEST = 110.0, 340.0
_FINEST = 65534  # steps of a value that a pointer is told


def scenes(plot: Matrices, width: float, limits: tuple[float, float], title: str = "") -> list[Scene]:
    """A drawing of each matrix."""
    found = []
    for panel in plot.panels:
        rows, columns = ([str(name) for name in names] for names in (panel.rows, panel.columns))
        height = float(np.clip(_CELL * len(rows), _LOWEST, _HIGHEST))
        x, y = named(plot.column_label, columns), named(plot.row_label, rows, downwards=True)
        drawn = frame(x, y, width, height, " ".join(filter(None, (title, panel.title))))
        values = shown(panel, plot.hide_diagonal)
        cells = _of_categories(drawn, values) if plot.categories else [_cells(drawn, values, limits)]
        found.append(drawn.scene(cells, cells=_packed(values, limits), vl=plot.value_label))
    return found


def shown(panel: Panel, hide_diagonal: bool) -> np.ndarray:
    """The values that are drawn, NaN elsewhere."""
    values = np.array(panel.values, np.float64)
    if hide_diagonal:
        np.fill_diagonal(values, np.nan)
    return values


def limits(plots: Sequence[Matrices]) -> tuple[float, float]:
    """The values of the first and the last colour of all of some figures."""
    if plots[0].categories:
        return 0.0, float(max(len(plots[0].categories) - 1, 1))
    if plots[0].limits is not None:
        return plots[0].limits
    known = np.concatenate([values[np.isfinite(values)] for plot in plots for values in _all_shown(plot)])
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    return low, high if high > low else low + 1


def keys(plot: Matrices) -> tuple[Key, ...]:
    """The legend of categories: an entry for each that is drawn."""
    there = {int(value) for values in _all_shown(plot) for value in np.unique(values[np.isfinite(values)])}
    return tuple(
        Key(label=f"{plot.value_label} {name}", colour=style.colour(place), shape="s", opacity=style.tint(place))
        for place, name in enumerate(plot.categories)
        if place in there
    )


def scale(plot: Matrices, limits: tuple[float, float]) -> ColourScale | None:
    """What the colours mean; None of categories."""
    if plot.categories:
        return None
    low, high = (texts([float(f"{value:.3g}")])[0] for value in limits)
    return ColourScale(label=plot.value_label, low=low, high=high, colours=style.SEQUENTIAL)


def _all_shown(plot: Matrices) -> list[np.ndarray]:
    return [shown(panel, plot.hide_diagonal) for panel in plot.panels]


def _cells(drawn: Frame, values: np.ndarray, limits: tuple[float, float]) -> Cells:
    low, high = limits
    steps = len(style.SEQUENTIAL) - 1
    place = np.clip((np.nan_to_num(values) - low) / (high - low), 0, 1)
    indices = np.where(np.isnan(values), 0, 1 + np.rint(place * steps))
    box = (drawn.left, drawn.top, drawn.right - drawn.left, drawn.bottom - drawn.top)
    return Cells(indices=indices.astype(np.uint8), colours=style.SEQUENTIAL, box=box)


def _of_categories(drawn: Frame, values: np.ndarray) -> list[Shape]:
    """A box for each run of equal neighbours in a row; a colour for each category."""
    across = (drawn.right - drawn.left) / values.shape[1]
    down = (drawn.bottom - drawn.top) / values.shape[0]
    boxes: dict[int, list[tuple[float, float, float, float]]] = {}
    for row, line in enumerate(values):
        ends = [*(np.flatnonzero(line[1:] != line[:-1]) + 1).tolist(), len(line)]
        for start, end in zip([0, *ends], ends, strict=False):
            if not np.isnan(line[start]):
                box = (drawn.left + start * across, drawn.top + row * down, (end - start) * across, down)
                boxes.setdefault(int(line[start]), []).append(box)
    return [
        Boxes(boxes=np.array(each), colour=style.colour(category), opacity=style.tint(category))
        for category, each in sorted(boxes.items())
    ]


def _packed(values: np.ndarray, limits: tuple[float, float]) -> dict[str, object]:
    """The values as base64 of little-endian uint16: 0 for none, then from the lowest to the highest."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else limits
    room = high - low or 1.0
    numbers = np.where(np.isfinite(values), 1 + np.rint((np.nan_to_num(values) - low) / room * (_FINEST - 1)), 0)
    return {
        "low": low,
        "step": room / (_FINEST - 1),
        "values": base64.b64encode(numbers.astype("<u2").tobytes()).decode(),
    }
