"""What a figure is drawn from: lines, areas, marks, cells and texts, in pixels, y downwards.

A colour is "ink", "c0", "c1", ... (which follow the page) or #rrggbb.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

SIZE = 12.0  # of texts


@dataclass(frozen=True, eq=False, kw_only=True)
class Line:
    """Points [n, 2] joined in their order; a gap where one is not finite.

    Attributes:
        label: what its points are values of; "" for lines that only help to read.
        names: of the points, such as clients.
    """

    points: np.ndarray
    colour: str = "ink"
    width: float = 1.0
    dash: Sequence[float] = ()
    opacity: float = 1.0
    label: str = ""
    names: Sequence[str] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Area:
    """A filled polygon [n, 2]."""

    points: np.ndarray
    colour: str
    opacity: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Boxes:
    """Filled rectangles [n, 4]: left, top, width, height."""

    boxes: np.ndarray
    colour: str
    opacity: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Marks:
    """A shape at each of some points [n, 2]; `label` and `names` as those of a line."""

    points: np.ndarray
    colour: str
    shape: str = "o"  # one of `style.SHAPES`
    radius: float = 3.0
    hollow: bool = False
    opacity: float = 1.0
    label: str = ""
    names: Sequence[str] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Cells:
    """Colours by index [R, C], 0 for none and n for colours[n - 1], filling a box: left, top, width, height."""

    indices: np.ndarray
    colours: Sequence[str]
    box: tuple[float, float, float, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Text:
    """A text whose baseline starts, is centred or ends at a place, turned anticlockwise by so many degrees."""

    text: str
    x: float
    y: float
    anchor: str = "middle"
    turned: float = 0.0
    bold: bool = False


Shape = Line | Area | Boxes | Marks | Cells | Text


@dataclass(frozen=True, eq=False)
class Scene:
    """One drawing, and what a pointer over it says: `page.js` reads `hover`."""

    width: float
    height: float
    shapes: tuple[Shape, ...]
    title: str = ""
    hover: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Key:
    """An entry of the legend: a line (with a dash), or a mark where `shape` is given."""

    label: str
    colour: str
    dash: Sequence[float] = ()
    shape: str = ""
    opacity: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ColourScale:
    """What the colours of cells mean: the first is `low`, the last `high`."""

    label: str
    low: str
    high: str
    colours: Sequence[str]


@dataclass(frozen=True, eq=False, kw_only=True)
class Drawing:
    """A figure: its scenes side by side, and below them the legend and the scale of colours."""

    scenes: tuple[Scene, ...]
    keys: tuple[Key, ...] = ()
    scale: ColourScale | None = None


def moved(shape: Shape, right: float, down: float) -> Shape:
    """A shape at another place."""
    match shape:
        case Text():
            return replace(shape, x=shape.x + right, y=shape.y + down)
        case Cells():
            left, top, width, height = shape.box
            return replace(shape, box=(left + right, top + down, width, height))
        case Boxes():
            return replace(shape, boxes=shape.boxes + np.array([right, down, 0, 0]))
        case Line() | Area() | Marks():
            return replace(shape, points=shape.points + np.array([right, down]))


def width_of(text: str) -> float:
    """About how wide a text is drawn."""
    return 0.56 * SIZE * len(text)
