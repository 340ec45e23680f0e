"""A figure as one drawing: its scenes side by side, and below them the legend and the scale of colours."""

import numpy as np

from pflmpi.analysis.drawing.scene import (
    SIZE,
    Cells,
    ColourScale,
    Drawing,
    Key,
    Line,
    Marks,
    Scene,
    Shape,
    Text,
    moved,
    width_of,
)

_MOST = 3  # scenes side by side
_ROW = 1.5 * SIZE  # of the legend
_SWATCH, _GAP = 22.0, 14.0
_SCALE = 120.0  # pixels


def sheet(drawing: Drawing) -> Scene:
    """The whole figure, as it is in its files."""
    count = len(drawing.scenes)
    columns = 2 if count == 4 else min(count, _MOST)
    width = max(scene.width for scene in drawing.scenes)
    shapes: list[Shape] = []
    top = 0.0
    for start in range(0, count, columns):
        row = drawing.scenes[start : start + columns]
        for place, scene in enumerate(row):
            shapes += [moved(shape, place * width, top) for shape in scene.shapes]
        top += max(scene.height for scene in row)
    x, y = _GAP, top + _ROW / 2
    for key in drawing.keys:
        wide = _SWATCH + 6 + width_of(key.label)
        if x > _GAP and x + wide > columns * width:
            x, y = _GAP, y + _ROW
        shapes += _entry(key, x, y)
        x += wide + _GAP
    if drawing.scale is not None:
        shapes += _colours(drawing.scale, _GAP, y)
    return Scene(columns * width, y + _ROW if drawing.keys or drawing.scale else top, tuple(shapes))


def _entry(key: Key, x: float, y: float) -> list[Shape]:
    text = Text(text=key.label, x=x + _SWATCH + 6, y=y + 0.35 * SIZE, anchor="start")
    if key.shape:
        place = np.array([[x + _SWATCH / 2, y]])
        return [Marks(points=place, colour=key.colour, shape=key.shape, radius=5, opacity=key.opacity), text]
    return [Line(points=np.array([[x, y], [x + _SWATCH, y]]), colour=key.colour, dash=key.dash, width=2), text]


def _colours(scale: ColourScale, x: float, y: float) -> list[Shape]:
    indices = np.arange(1, len(scale.colours) + 1, dtype=np.uint8)[np.newaxis]
    start = x + width_of(scale.low) + 6
    return [
        Text(text=scale.low, x=x, y=y + 0.35 * SIZE, anchor="start"),
        Cells(indices=indices, colours=scale.colours, box=(start, y - SIZE / 2, _SCALE, SIZE)),
        Text(text=f"{scale.high}  {scale.label}", x=start + _SCALE + 6, y=y + 0.35 * SIZE, anchor="start"),
    ]
