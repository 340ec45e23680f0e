"""Renders charts as SVG, PNG and PDF by vl-convert, and writes them as JSON for the script of a page."""

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
_SCALE = 2  # pixels of a PNG per CSS pixel
_TAG = re.compile(r"<[^>]+>")  # of an SVG; what lies between tags are texts, which may have any names
_COLOURED = re.compile(r'"(?:range|stroke|\w*[cC]olor)":(?:"[^"]+"|\[[^]]+\])')  # properties of a chart in JSON
_ID = re.compile(r"\b(clip|gradient_)(?=\d)")  # ids in an SVG, which must be unique on a page
_PAGE_COLOURS = {INK: "currentColor", **{colour: f"var(--c{index})" for index, colour in enumerate(COLOURS)}}


@dataclass(frozen=True)
class Drawn:
    """A figure that was drawn into a folder."""

    plot: Plot  # the figure after downsampling
    svg: Path
    pictures: tuple[Path, ...]  # PNG and PDF files, if requested
    inline: str  # the <svg> element for the page, with the CSS colours `currentColor`, --c0, --c1, ...
    spec: str  # the chart as JSON for the script of the page, with the same colours
    panels: int  # number of panels side by side


def draw(plot: Plot, folder: Path, pictures: Sequence[str] = ()) -> Drawn:
    """Draws a figure as folder/NAME.svg (transparent), and as .png or .pdf (white background) if requested.

    Args:
        pictures: some of `PICTURES`.
    """
    shown = downsample(plot)
    spec = build_chart(shown)
    svg = render_svg(spec)
    path = folder / f"{plot.name}.svg"
    atomic.write(path, svg.encode())
    picture_paths = tuple(path.with_suffix(f".{kind}") for kind in pictures)
    for picture_path in picture_paths:
        atomic.write(picture_path, render_picture(svg, picture_path.suffix))
    inline = _TAG.sub(lambda tag: _use_page_colours(_ID.sub(lambda name: f"{plot.name}_{name[0]}", tag[0])), svg)
    without_config = {key: part for key, part in spec.items() if key != "config"}  # the page has it once for all charts
    return Drawn(shown, path, picture_paths, inline, _dump(without_config), int(spec.get("columns", 1)))


def render_svg(spec: Spec) -> str:
    """Renders a chart without its hover layers as SVG."""
    if problem := limits.too_few_addresses_to_draw():
        raise UserError(problem)
    svg: str = vl_convert.vegalite_to_svg(_drop_hover(spec))
    return svg


def render_picture(svg: str, kind: str) -> bytes:
    """Converts an SVG to ".png" or ".pdf" with a white background."""
    white = re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="white"/>', svg, count=1)
    picture: bytes = vl_convert.svg_to_png(white, scale=_SCALE) if kind == ".png" else vl_convert.svg_to_pdf(white)
    return picture


def dump_config() -> str:
    """The Vega-Lite configuration of all charts of a page, as JSON."""
    return _dump(CONFIG)


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


def _drop_hover(spec: Any) -> Any:
    """A chart without its hover layers and parameters."""
    if isinstance(spec, dict):
        parts = ("layer", "concat", "spec", "params")
        return {key: _drop_hover(part) if key in parts else part for key, part in spec.items()}
    if isinstance(spec, list):
        return [_drop_hover(part) for part in spec if not part.get("name", "").startswith(HOVER)]
    return spec


def _dump(spec: Spec) -> str:
    """A chart, or a part of it, as JSON with the colours of the page."""
    text = json.dumps(spec, separators=(",", ":"))
    return _COLOURED.sub(lambda part: _use_page_colours(part[0]), text)


def _use_page_colours(text: str) -> str:
    """Replaces colours by the CSS variables of the page, which differ in dark mode."""
    for colour, name in _PAGE_COLOURS.items():
        text = text.replace(colour, name)
    return text
