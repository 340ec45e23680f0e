"""The axes around a drawing: where values are, the numbers or names beside them, and what they are called."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pflmpi.analysis.drawing import ticks
from pflmpi.analysis.drawing.scene import SIZE, Line, Scene, Shape, Text, width_of

_GRID = 0.14  # opacity
_MARGIN = 6.0
_TURNED = 40.0  # degrees of long names below an axis
_LONG = 32.0  # pixels of a name that is turned, unless all have room
_ROW, _GAP = 1.25 * SIZE, 1.5 * SIZE  # pixels from one name to the next


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Values from low to high, and what they are called.

    Attributes:
        names: of the values 1, 2, ..., where they are no quantities.
        ticks: the values that are written; none for round numbers.
    """

    label: str
    low: float
    high: float
    log: bool = False
    whole: bool = False
    names: Sequence[str] = ()
    ticks: Sequence[float] = ()


@dataclass(frozen=True)
class Frame:
    """Axes in a drawing of this size, and the pixels of their ends: left, right, top and bottom."""

    width: float
    height: float
    title: str
    x: Axis
    y: Axis
    left: float
    right: float
    top: float
    bottom: float
    shapes: tuple[Shape, ...] = ()

    def places(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The pixels [n, 2] of values [n]."""
        return np.stack([_between(self.x, self.left, self.right, x), _between(self.y, self.bottom, self.top, y)], 1)

    def scene(self, shapes: Sequence[Shape], **hover: Any) -> Scene:
        """The drawing with these shapes on the axes, and more for a pointer over it."""
        found = {**self._hover, **hover}
        return Scene(self.width, self.height, (*self.shapes, *shapes), self.title, found)

    @property
    def _hover(self) -> dict[str, Any]:
        """How a pointer's pixels become values."""
        x = [round(self.left, 2), round(self.right, 2), float(self.x.low), float(self.x.high), int(self.x.log)]
        y = [round(self.bottom, 2), round(self.top, 2), float(self.y.low), float(self.y.high), int(self.y.log)]
        names = {key: list(axis.names) for key, axis in (("xn", self.x), ("yn", self.y)) if axis.names}
        return {"x": x, "y": y, "xl": self.x.label, "yl": self.y.label, **names}


def common(axes: Sequence[Axis]) -> Axis:
    """An axis on which all of some have room."""
    names = max((axis.names for axis in axes), key=len)
    return replace(axes[0], low=min(one.low for one in axes), high=max(one.high for one in axes), names=names)


def limits(label: str, values: Sequence[np.ndarray], log: bool = False, padding: float = 0.04) -> Axis:
    """An axis that shows all known values, with some room."""
    known = np.concatenate([np.asarray(part, np.float64) for part in values] or [np.empty(0)])
    known = known[np.isfinite(known) & (known > 0)] if log else known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 10.0)
    if log:
        room = max(high / low, 1.1) ** padding
        return Axis(label=label, low=low / room, high=high * room, log=True)
    room = (high - low) * padding or max(abs(low), 1.0) * 0.1
    return Axis(label=label, low=low - room, high=high + room)


def named(label: str, names: Sequence[str], downwards: bool = False) -> Axis:
    """An axis of names, at the values 1, 2, ..."""
    ends = (len(names) + 0.5, 0.5) if downwards else (0.5, len(names) + 0.5)
    return Axis(label=label, low=ends[0], high=ends[1], names=names)


def frame(x: Axis, y: Axis, width: float, height: float, title: str = "") -> Frame:
    """Axes whose inside is this high, in a drawing that is this wide, with their numbers and a faint grid."""
    top = _MARGIN + (1.8 * SIZE if title else 0.5 * SIZE)
    bottom = top + height
    heights, texts = _beside(y, height)
    left = _MARGIN + (1.6 * SIZE if y.label else 0) + max(map(width_of, texts), default=0.0)
    right = width - _MARGIN - 0.5 * SIZE
    values, below, turned = _below(x, right - left)
    longest = max(map(width_of, below), default=0.0)
    deep = SIZE + (longest * float(np.sin(np.radians(_TURNED))) if turned else 0)
    whole = bottom + 5 + deep + (1.5 * SIZE if x.label else 0.5 * SIZE)
    empty = Frame(width, whole, title, x, y, left, right, top, bottom)
    shapes: list[Shape] = [Line(points=np.array([[left, top], [left, bottom], [right, bottom]]), opacity=0.6)]
    if y.label:
        shapes.append(Text(text=y.label, x=_MARGIN + 0.7 * SIZE, y=(top + bottom) / 2, turned=90))
    if x.label:
        shapes.append(Text(text=x.label, x=(left + right) / 2, y=whole - 0.4 * SIZE))
    if title:
        shapes.append(Text(text=title, x=left, y=_MARGIN + SIZE, anchor="start", bold=True))
    for (_, place), text in zip(empty.places(np.full(len(heights), x.low), np.array(heights)), texts, strict=True):
        if not y.names:
            shapes.append(Line(points=np.array([[left, place], [right, place]]), opacity=_GRID))
        shapes.append(Text(text=text, x=left - 4, y=float(place) + 0.35 * SIZE, anchor="end"))
    for (place, _), text in zip(empty.places(np.array(values), np.full(len(values), y.low)), below, strict=True):
        shapes.append(Line(points=np.array([[place, bottom], [place, bottom + 4]]), opacity=0.6))
        anchor = "end" if turned else "middle"
        shapes.append(Text(text=text, x=float(place), y=bottom + 5 + SIZE, anchor=anchor, turned=turned))
    return replace(empty, shapes=tuple(shapes))


def _beside(axis: Axis, room: float) -> tuple[list[float], list[str]]:
    """The values beside a vertical axis and their texts."""
    if axis.names:
        return _some_names(axis, max(1, int(room // _ROW)))
    values = _round_numbers(axis, max(2, int(room // (3 * SIZE))))
    return values, ticks.texts(values)


def _below(axis: Axis, room: float) -> tuple[list[float], list[str], float]:
    """The values below a horizontal axis, their texts, and by how many degrees these are turned."""
    if axis.names:
        longest = max(map(width_of, axis.names))
        turned = longest > _LONG and longest + SIZE > room / len(axis.names)
        step = _ROW if turned else longest + SIZE
        return *_some_names(axis, max(1, int(room // step))), _TURNED if turned else 0.0
    if axis.ticks:
        values = _apart(axis, list(axis.ticks), room)
        return values, ticks.texts(values), 0.0
    values = []
    for most in range(max(2, int(room // (SIZE + _GAP))), 1, -1):
        values = _round_numbers(axis, most)
        if len(_apart(axis, values, room)) == len(values):
            break
    return values, ticks.texts(values), 0.0


def _apart(axis: Axis, values: list[float], room: float) -> list[float]:
    """Those of some values whose texts below the axis do not touch, from the last one backwards."""
    places = _between(axis, 0.0, room, np.array(values)).tolist()
    found: list[float] = []
    left = np.inf  # where the texts so far begin
    for value, place, text in reversed(list(zip(values, places, ticks.texts(values), strict=True))):
        half = width_of(text) / 2
        if place + half + _GAP <= left:
            found.insert(0, value)
            left = place - half
    return found


def _some_names(axis: Axis, most: int) -> tuple[list[float], list[str]]:
    places = range(0, len(axis.names), -(-len(axis.names) // most) or 1)
    return [place + 1.0 for place in places], [axis.names[place] for place in places]


def _round_numbers(axis: Axis, most: int) -> list[float]:
    make = ticks.logarithmic(axis.low, axis.high, most) if axis.log else None
    return ticks.linear(axis.low, axis.high, most, axis.whole) if make is None else make


def _between(axis: Axis, start: float, end: float, values: np.ndarray) -> np.ndarray:
    low, high = axis.low, axis.high
    numbers = np.asarray(values, np.float64)
    if axis.log:
        low, high = np.log10(low), np.log10(high)
        numbers = np.log10(np.where(numbers > 0, numbers, np.nan))
    return np.asarray(start + (numbers - low) / (high - low) * (end - start))
