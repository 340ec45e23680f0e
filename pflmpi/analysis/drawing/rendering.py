"""Charts as SVG, PNG and PDF, and as JSON for the script of a page: by vl-convert, without a browser."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vl_convert

from pflmpi import atomic, limits
from pflmpi.analysis.drawing.charts import COLOURS, CONFIG, HOVER, INK, Spec, build_chart
from pflmpi.analysis.plots import Plot, downsample
from pflmpi.errors import UserError
from pflmpi.machine import private_folder

PICTURES = ("png", "pdf")
ON_DARK = (
    *("#6fa8dc", "#ff7f8f", "#6fd6a4", "#ffc46b", "#b99cf0", "#a5e0ff"),
    *("#d3b57c", "#bdbdbd", "#f08ad4", "#c3e06a", "#5fd0d8", "#ffab8a"),
)
_SCALE = 2  # pixels of a PNG for one of a page
_TAG = re.compile(r"<[^>]+>")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")
_RGB = re.compile(r"rgb\((\d+), (\d+), (\d+)\)")
# The page describes the whole; defaults of SVG.
_UNUSED = re.compile(r' (?:(?:class|role|aria-[a-z]+|pointer-events)="[^"]*"|opacity="1"|[xy]2="0")')
_FONT = f' font-family="{CONFIG["font"]}"'
_REFERENCE = re.compile(r"\b(clip|gradient_)(?=\d)")
_PAGE_COLOURS = {INK: "currentColor", **{colour: f"var(--c{place})" for place, colour in enumerate(COLOURS)}}


@dataclass(frozen=True)
class Drawn:
    """A figure in a folder.

    Attributes:
        plot: what is drawn, with what its caption says of points that are left out.
        pictures: further files, where they were asked for.
        inline: the <svg> element of the page; its colours are CSS: `currentColor`, --c0, --c1, ...
        spec: the chart as JSON for the script of the page: the same colours, and its data by column.
        panels: how many panels are side by side.
    """

    plot: Plot
    svg: Path
    pictures: tuple[Path, ...]
    inline: str
    spec: str
    panels: int


def draw(plot: Plot, folder: Path, pictures: Sequence[str] = ()) -> Drawn:
    """Draws a figure as folder/NAME.svg (transparent), and as .png or .pdf (white background) if requested.

    Args:
        pictures: some of `PICTURES`.
    """
    shown = downsample(plot)
    spec = build_chart(shown)
    text = render_svg(spec)
    path = folder / f"{plot.name}.svg"
    path.write_text(text, encoding="utf-8")
    others = tuple(path.with_suffix(f".{kind}") for kind in pictures)
    for other in others:
        other.write_bytes(render_picture(text, other.suffix))
    inline = _in_page(_REFERENCE.sub(lambda match: f"{plot.name}_{match[0]}", text))
    of_chart = {key: part for key, part in spec.items() if key != "config"}  # which the page has once
    packed = _in_page(json.dumps(_by_column(of_chart), separators=(",", ":")))
    return Drawn(shown, path, others, inline, packed, int(spec.get("columns", 1)))


def render_svg(spec: Spec) -> str:
    """A chart as SVG without its hover layers; coordinates have two digits."""
    if problem := limits.too_few_addresses_to_draw():
        raise UserError(problem)
    text: str = vl_convert.vegalite_to_svg(_without_hover(spec))
    text = _TAG.sub(lambda tag: _LONG_NUMBER.sub(_shortened, tag[0]), text)  # and not the texts
    text = _RGB.sub(lambda colour: "#{:02x}{:02x}{:02x}".format(*map(int, colour.groups())), text)
    return _UNUSED.sub("", text).replace(_FONT, "").replace("<svg", f"<svg{_FONT}", 1)


def _shortened(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def render_picture(svg: str, kind: str) -> bytes:
    """An SVG as ".png" or ".pdf" on a white background."""
    white = re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="white"/>', svg, count=1)
    made: bytes = vl_convert.svg_to_png(white, scale=_SCALE) if kind == ".png" else vl_convert.svg_to_pdf(white)
    return made


def dump_config() -> str:
    """The Vega-Lite configuration of all charts of a page, as JSON."""
    return _in_page(json.dumps(CONFIG, separators=(",", ":")))


@cache
def read_script() -> str:
    """The JavaScript bundle of a page: Vega, Vega-Lite, vega-embed and the expression interpreter.

    Bundling takes longer than drawing a figure, so the bundle is cached in the user's private temporary folder.
    """
    try:
        path = private_folder() / f"vega-embed-{version('vl-convert-python')}.js"
        if not path.exists():
            atomic.write(path, _build_bundle().encode())
        return path.read_text(encoding="utf-8")
    except OSError:
        return _build_bundle()


def _build_bundle() -> str:
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")


def _without_hover(spec: Any) -> Any:
    """A chart without its hover layers and parameters."""
    if isinstance(spec, dict):
        parts = ("layer", "concat", "spec", "params")
        return {key: _without_hover(part) if key in parts else part for key, part in spec.items()}
    if isinstance(spec, list):
        return [_without_hover(part) for part in spec if not part.get("name", "").startswith(HOVER)]
    return spec


def _by_column(spec: Any) -> Any:
    """A chart with its data by column; columns of texts are dictionary-encoded."""
    if isinstance(spec, list):
        return [_by_column(part) for part in spec]
    if not isinstance(spec, dict):
        return spec
    packed = {}
    for key, part in spec.items():
        if key == "data":
            rows = part["values"]
            names = dict.fromkeys(name for row in rows for name in row)
            packed[key] = {name: _column([row.get(name) for row in rows]) for name in names}
        else:
            packed[key] = _by_column(part)
    return packed


def _column(values: list[Any]) -> Any:
    if not any(isinstance(value, str) for value in values):
        return values
    texts = list(dict.fromkeys(values))
    numbers = {text: place for place, text in enumerate(texts)}
    return {"texts": texts, "numbers": [numbers[value] for value in values]}


def _in_page(text: str) -> str:
    for colour, name in _PAGE_COLOURS.items():
        text = text.replace(colour, name)
    return text
