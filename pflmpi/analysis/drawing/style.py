"""The look of figures: colours that also differ in brightness, lines and markers that do without colour."""

from typing import Any

WIDTH = 8.0  # inches
DPI = 100  # so that a figure is 800 pixels wide
INK = "#010203"  # text and axes; a page writes them in its own colour, which is why it is nobody else's
COLOURS = ("#0b3c5d", "#d1495b", "#2f9e6e", "#d98c1f", "#6f4aa5", "#4a9fd0", "#8a6d3b", "#7b7b7b")
ON_DARK = ("#6fa8dc", "#ff7f8f", "#6fd6a4", "#ffc46b", "#b99cf0", "#a5e0ff", "#d3b57c", "#bdbdbd")
_LINES = ("-", "--", "-.", ":")
_MARKERS = "osD^vPX*"
SEQUENTIAL = "cividis"  # evenly brighter, also for the colour blind and in greyscale
DARKEST = 0.2  # of that scale: below, cells would vanish on a dark page
_MOST_MARKERS = 12  # on a line

SETTINGS: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "path.simplify_threshold": 0.5,
}


def line(style: int, points: int) -> dict[str, Any]:
    """Colour, line and marker number `style` for a line of so many points."""
    every = max(1, points // _MOST_MARKERS)
    colour = COLOURS[style % len(COLOURS)]
    return {
        "color": colour,
        "linestyle": _LINES[(style + style // len(COLOURS)) % len(_LINES)],
        "marker": _MARKERS[(style + style // len(COLOURS)) % len(_MARKERS)],
        "markevery": (style % every, every),
        "markersize": 4,
        "linewidth": 1.6,
    }


def colour(number: int) -> str:
    """Colour `number`, from the first again after the last."""
    return COLOURS[number % len(COLOURS)]
