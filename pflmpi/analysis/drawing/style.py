"""The look of figures: colours that also differ in brightness, lines and marks that do without colour."""

from collections.abc import Sequence

import numpy as np

WIDTH = 400.0  # pixels of a drawing that is alone
NARROW = 300.0  # of one of several side by side
HEIGHT = 220.0  # inside the axes, where nothing else decides
INK = "#1a1c1f"
COLOURS = ("#0b3c5d", "#d1495b", "#2f9e6e", "#d98c1f", "#6f4aa5", "#4a9fd0", "#8a6d3b", "#7b7b7b")
ON_DARK = ("#6fa8dc", "#ff7f8f", "#6fd6a4", "#ffc46b", "#b99cf0", "#a5e0ff", "#d3b57c", "#bdbdbd")
SHAPES = "osD^vPX*"
_DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (6, 2, 1.5, 2), (1.5, 2.5))
_MOST_MARKS = 12  # on a line
# Cividis without its darkest fifth, which would vanish on a dark page: evenly brighter, also for the colour blind.
_CIVIDIS = ("#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")
_LEVELS = 240


def colour(number: int) -> str:
    """Name of colour `number`, from the first again after the last."""
    return f"c{number % len(COLOURS)}"


def tint(number: int) -> float:
    """Opacity of category `number`: paler where the colours begin again."""
    return 0.55 ** (number // len(COLOURS) % 3)


def dash(number: int) -> tuple[float, ...]:
    """Dashes of line `number`."""
    return _DASHES[(number + number // len(COLOURS)) % len(_DASHES)]


def mark(number: int, points: int) -> tuple[str, int]:
    """Shape of marks `number`, and that every so many of the points has one."""
    return SHAPES[(number + number // len(COLOURS)) % len(SHAPES)], max(1, points // _MOST_MARKS)


def _between(anchors: Sequence[str]) -> tuple[str, ...]:
    """Colours from the first anchor to the last."""
    known = np.array([[int(anchor[i : i + 2], 16) for i in (1, 3, 5)] for anchor in anchors])
    places = np.linspace(0, len(anchors) - 1, _LEVELS)
    rgb = np.stack([np.interp(places, range(len(anchors)), known[:, part]) for part in range(3)], 1).round().astype(int)
    return tuple(f"#{r:02x}{g:02x}{b:02x}" for r, g, b in rgb.tolist())


SEQUENTIAL = _between(_CIVIDIS)


def on_white(name: str) -> str:
    """#rrggbb of a colour of a drawing, on white ground."""
    return name if name.startswith("#") else INK if name == "ink" else COLOURS[int(name.removeprefix("c"))]
