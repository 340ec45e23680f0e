"""A drawing as PNG or PDF, painted with matplotlib exactly where the SVG has it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from pflmpi.analysis.drawing import marks, style
from pflmpi.analysis.drawing.scene import SIZE, Area, Boxes, Cells, Line, Marks, Scene, Shape, Text

_POINT = 72 / 96  # points in a pixel of a page
_DPI = 192  # two pixels for one of a page


def write(scene: Scene, paths: Sequence[Path]) -> None:
    """Write a drawing on white ground; the endings of the paths say as what."""
    with rc_context({"font.family": ["DejaVu Sans"], "pdf.fonttype": 42}):
        figure = Figure(figsize=(scene.width / 96, scene.height / 96), dpi=_DPI)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        for shape in scene.shapes:
            _paint(axes, shape)
        axes.set_xlim(0, scene.width)
        axes.set_ylim(scene.height, 0)
        for path in paths:
            undated = {"Software": None} if path.suffix == ".png" else {"CreationDate": None}
            figure.savefig(path, facecolor="white", metadata=undated)


def _paint(axes: Any, shape: Shape) -> None:
    match shape:
        case Line():
            dash = (0, [part / shape.width for part in shape.dash]) if shape.dash else "-"
            look = {"color": style.on_white(shape.colour), "alpha": shape.opacity, "linestyle": dash}
            axes.plot(*shape.points.T, linewidth=shape.width * _POINT, solid_capstyle="butt", **look)
        case Area():
            axes.fill(*shape.points.T, color=style.on_white(shape.colour), alpha=shape.opacity, linewidth=0)
        case Boxes():
            corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
            boxes = [box[:2] + corners * box[2:] for box in shape.boxes]
            _polygons(axes, boxes, shape.colour, shape.opacity)
        case Marks():
            known = shape.points[np.isfinite(shape.points).all(1)]
            outlines = [place + shape.radius * marks.polygon(shape.shape) for place in known]
            _polygons(axes, outlines, shape.colour, shape.opacity, shape.hollow)
        case Cells():
            left, top, width, height = shape.box
            palette = np.array([(0, 0, 0, 0), *((*to_rgb(colour), 1) for colour in shape.colours)])
            extent = (left, left + width, top + height, top)
            axes.imshow(palette[shape.indices], extent=extent, interpolation="none", aspect="auto")
        case Text():
            side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            weight = "bold" if shape.bold else "normal"
            look = {"fontsize": 0.92 * SIZE * _POINT, "color": style.INK, "fontweight": weight}
            around = {"rotation": shape.turned, "rotation_mode": "anchor"}
            axes.text(shape.x, shape.y, shape.text, ha=side, va="baseline", parse_math=False, **around, **look)


def _polygons(axes: Any, corners: list[np.ndarray], colour: str, opacity: float, hollow: bool = False) -> None:
    shown = style.on_white(colour)
    look = {"facecolors": "none", "edgecolors": shown, "linewidths": 1.6 * _POINT} if hollow else {"facecolors": shown}
    axes.add_collection(PolyCollection(corners, alpha=opacity, **({"linewidths": 0} | look)))
