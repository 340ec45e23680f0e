"""A drawing as SVG.

Of a labelled line or marks, every point begins a command "M" or "L" of its path, and nothing else does: `page.js` finds
them there.
"""

import base64
import html
import json
from collections.abc import Callable
from math import isfinite

import numpy as np

from pflmpi.analysis.drawing import marks, png, style
from pflmpi.analysis.drawing.scene import SIZE, Area, Boxes, Cells, Line, Marks, Scene, Shape, Text

_FONTS = "system-ui, 'DejaVu Sans', Verdana, sans-serif"

Colour = Callable[[str], str]


def inline(scene: Scene, description: str) -> str:
    """An <svg> element for a page, in whose colours it is; how pixels become values is in `data-hover`."""
    said = html.escape(json.dumps(scene.hover, separators=(",", ":")), quote=True)
    about = f'role="img" aria-label="{html.escape(description, quote=True)}" data-hover="{said}"'
    return _element(scene, about, _of_page)


def file(scene: Scene) -> str:
    """A file on a transparent ground."""
    size = f'width="{_number(scene.width)}" height="{_number(scene.height)}" font-family="{_FONTS}"'
    about = f'xmlns="http://www.w3.org/2000/svg" {size}'
    return f'<?xml version="1.0" encoding="utf-8"?>\n{_element(scene, about, style.on_white)}\n'


def _element(scene: Scene, about: str, colour: Colour) -> str:
    box = f"0 0 {_number(scene.width)} {_number(scene.height)}"
    parts = "\n".join(_part(shape, colour) for shape in scene.shapes)
    return f'<svg {about} viewBox="{box}" font-size="{SIZE:g}" fill="none">\n{parts}\n</svg>'


def _part(shape: Shape, colour: Colour) -> str:
    match shape:
        case Line():
            dash = f' stroke-dasharray="{" ".join(map(_number, shape.dash))}"' if shape.dash else ""
            return _path(_joined(shape.points), shape, f'stroke-width="{_number(shape.width)}"{dash}', "stroke", colour)
        case Area():
            return _path(f"{_joined(shape.points)}z", shape, "", "fill", colour)
        case Boxes():
            edges = (f"M{_pair(x, y)}h{_number(w)}v{_number(h)}h{_number(-w)}z" for x, y, w, h in shape.boxes.tolist())
            return _path("".join(edges), shape, "", "fill", colour)
        case Marks():
            outline = marks.outline(shape.shape, shape.radius)
            where = "".join(f"M{_pair(x, y)}{outline}" for x, y in shape.points[_known(shape)].tolist())
            return _path(
                where, shape, 'stroke-width="1.6"' * shape.hollow, "stroke" if shape.hollow else "fill", colour
            )
        case Cells():
            left, top, width, height = map(_number, shape.box)
            source = base64.b64encode(png.of_palette(shape.indices, shape.colours)).decode()
            place = f'x="{left}" y="{top}" width="{width}" height="{height}" preserveAspectRatio="none"'
            return f'<image {place} style="image-rendering:pixelated" href="data:image/png;base64,{source}"/>'
        case Text():
            x, y = _number(shape.x), _number(shape.y)
            turned = f' transform="rotate({-shape.turned:g} {x} {y})"' if shape.turned else ""
            anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
            weight = ' font-weight="600"' if shape.bold else ""
            text = html.escape(shape.text, quote=False)
            return f'<text x="{x}" y="{y}"{anchor}{turned}{weight} fill="{colour("ink")}">{text}</text>'


def _path(where: str, shape: Line | Area | Boxes | Marks, look: str, kind: str, colour: Colour) -> str:
    said = ""
    if isinstance(shape, Line | Marks) and shape.label:
        names = [name for name, known in zip(shape.names, _known(shape).tolist(), strict=False) if known]
        said = f' data-label="{html.escape(shape.label, quote=True)}"'
        said += f' data-names="{html.escape("|".join(names), quote=True)}"' if names else ""
    opacity = f' opacity="{_number(shape.opacity)}"' if shape.opacity < 1 else ""
    return f'<path d="{where}" {kind}="{colour(shape.colour)}" {look}{opacity}{said}/>'


def _joined(points: np.ndarray) -> str:
    """A path through points, with gaps where one is not finite."""
    parts, command = [], "M"
    for x, y in points.tolist():
        if not (isfinite(x) and isfinite(y)):
            command = "M"
        else:
            parts.append(f"{command}{_pair(x, y)}")
            command = "L"
    return "".join(parts)


def _known(shape: Line | Marks) -> np.ndarray:
    return np.asarray(np.isfinite(shape.points).all(1))


def _pair(x: float, y: float) -> str:
    return f"{_number(x)} {_number(y)}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _of_page(colour: str) -> str:
    return colour if colour.startswith("#") else "currentColor" if colour == "ink" else f"var(--{colour})"
