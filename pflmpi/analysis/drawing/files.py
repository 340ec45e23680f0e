"""A figure as files, and as SVG to put into a page."""

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from pflmpi.analysis.drawing import style
from pflmpi.analysis.drawing.clouds import clouds
from pflmpi.analysis.drawing.curves import apart, bars, curves, stack
from pflmpi.analysis.drawing.dots import dots
from pflmpi.analysis.drawing.matrices import matrices
from pflmpi.analysis.plots import Clouds, Curves, Matrices, Plot, Stack
from pflmpi.analysis.series.final import Dots

_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>|<!-- .*? -->\n", re.DOTALL)
_GLOBAL_STYLE = re.compile(r"<style[^>]*>.*?</style>", re.DOTALL)  # it would hold for the whole page
_GROUP = re.compile(r' id="(?:figure|axes|patch|text|line2d|matplotlib\.axis|[xy]tick|legend|[A-Za-z]*Collection)_\d+"')
_UNTURNED = re.compile(r' transform="rotate\(-?0 [^"]*"')
_COORDINATES = re.compile(r' (?:d|x|y)="[^"]*"')
_FINE, _COARSE = re.compile(r"(\.\d\d)\d+"), re.compile(r"(\.\d)\d+")
_LONG = 400  # characters of a path that needs no finer coordinates than a tenth of a point
_INDENTED = re.compile(r"\n\s+")


@dataclass(frozen=True)
class Drawn:
    """A figure in a folder.

    Attributes:
        png, svg: its files.
        inline: an <svg> element whose text and colours follow the page: `currentColor`, and --c0, --c1, ...
    """

    png: Path
    svg: Path
    inline: str


def draw(plot: Plot, folder: Path, pdf: bool = False) -> Drawn:
    """Draw a figure into folder/NAME.png (white ground) and folder/NAME.svg (transparent).

    Args:
        pdf: into folder/NAME.pdf too.
    """
    png, svg = folder / f"{plot.name}.png", folder / f"{plot.name}.svg"
    # Names inside the SVG come from the content and this salt: the same figure is the same file.
    settings: Any = {**style.SETTINGS, "svg.hashsalt": plot.name}
    with rc_context(settings):
        figure = _figure(plot)
        if (engine := figure.get_layout_engine()) is not None:
            engine.execute(figure)
        figure.set_layout_engine(None)  # it is laid out; with any engine, each file would be drawn twice
        figure.savefig(png, facecolor="white", metadata={"Software": None})
        if pdf:
            figure.savefig(png.with_suffix(".pdf"), metadata={"CreationDate": None, "Creator": None})
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = _tidy(file.getvalue())
    svg.write_text(text.replace(style.INK, "#000000"), encoding="utf-8")
    return Drawn(png, svg, _following_page(text))


def _figure(plot: Plot) -> Figure:
    match plot:
        case Curves(apart=True):
            return apart(plot)
        case Curves():
            return curves(plot)
        case Dots():
            return dots(plot)
        case Stack():
            return bars(plot) if plot.names else stack(plot)
        case Matrices():
            return matrices(plot)
        case Clouds():
            return clouds(plot)
    raise AssertionError(f"no drawing for {type(plot).__name__}")


def _tidy(text: str) -> str:
    """Without metadata, names of groups, and digits smaller than can be seen."""
    for superfluous in (_METADATA, _GROUP, _UNTURNED):
        text = superfluous.sub("", text)
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return _INDENTED.sub("\n", _COORDINATES.sub(_rounded, text))


def _rounded(found: re.Match[str]) -> str:
    return (_COARSE if len(found[0]) > _LONG else _FINE).sub(r"\1", found[0])


def _following_page(text: str) -> str:
    text = _GLOBAL_STYLE.sub("", _HEAD.sub("", text)).replace(style.INK, "currentColor")
    for number, colour in enumerate(style.COLOURS):
        text = text.replace(colour, f"var(--c{number})")
    return text.strip()
