"""Figures as Vega-Lite charts: one description for the page, for notebooks and for SVG, PNG and PDF."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pflmpi.analysis.plots import Bars, Cloud, Clouds, Curve, Curves, Dots, Matrices, Multiples, Panel, Plot, Stack

Spec = dict[str, Any]

HOVER = "hover"  # how names of layers begin that only answer a pointer: pictures leave them out
WIDTH, NARROW, HEIGHT = 330, 240, 210  # pixels inside the axes: alone, one of several panels
INK = "#1a1c1f"
COLOURS = (
    *("#0b3c5d", "#d1495b", "#2f9e6e", "#d98c1f", "#6f4aa5", "#4a9fd0"),
    *("#8a6d3b", "#7b7b7b", "#b0328f", "#7d9a1f", "#1f7f86", "#c9673f"),
)
_DASHES = ([1, 0], [6, 3], [6, 2, 1.5, 2], [1.5, 2.5])
_SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right")
_STAR = "M0,-1L0.23,-0.31L0.95,-0.31L0.36,0.12L0.59,0.81L0,0.38L-0.59,0.81L-0.36,0.12L-0.95,-0.31L-0.23,-0.31Z"
# Cividis without its darkest fifth, which would vanish on a dark page: evenly brighter, also for the colour blind.
_CIVIDIS = ["#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"]

_LONGEST = 250  # pixels of a label in a legend
_MANY = 12  # curves; more are drawn thin
_DOTTED = 24  # points of a curve, up to which each has a dot
_COLUMNS = 3  # panels side by side
_CELL, _LOWEST, _HIGHEST = 13, 110, 340  # pixels: a row of a matrix, and the height of all
_ROW = 13  # pixels of a row of dots

_TEXT = {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"}
_UNMEASURED = {"labelLimit": 0, "titleLimit": 0, "labelOverlap": False, "labelBound": False}  # half of the time is text
CONFIG: Spec = {
    "aria": False,  # the page describes each drawing as a whole
    "background": "transparent",
    "padding": 4,
    "font": "system-ui, DejaVu Sans, Verdana, sans-serif",
    "view": {"stroke": None},
    "axis": {**_TEXT, "domainColor": INK, "tickColor": INK, "gridColor": INK, "gridOpacity": 0.12, **_UNMEASURED},
    "axisQuantitative": {"tickCount": 5},
    "legend": {
        **_TEXT,
        "orient": "bottom",
        "labelLimit": 250,
        "symbolStrokeWidth": 2.5,
        "symbolOpacity": 1,
        "columnPadding": 14,
    },
    "header": {"labelColor": INK, "labelFontSize": 12, "labelFontWeight": "bold", "labelAnchor": "start"},
    "title": {"color": INK, "fontSize": 12, "anchor": "start"},
}


def chart(plot: Plot) -> Spec:
    """The Vega-Lite chart of a figure, with its data.

    Parameters of it: `picked`, the entries of the legend that are selected, and `client`, the client that stands out.
    """
    return {"description": f"{plot.title}. {plot.caption}", **_drawing(plot), "config": CONFIG}


def _drawing(plot: Plot) -> Spec:
    match plot:
        case Curves(apart=True):
            panels = [(curve.label, replace(plot, curves=(replace(curve, label=""),))) for curve in plot.curves]
            return _curves(plot, panels)
        case Curves():
            return _curves(plot, [("", plot)])
        case Stack():
            return _stack([("", plot)])
        case Matrices():
            return _matrices([("", plot)])
        case Dots():
            return _dots(plot)
        case Clouds():
            return _clouds(plot)
        case Bars():
            return _bars(plot)
        case Multiples():
            first = plot.parts[0][1]
            if isinstance(first, Curves):
                return _curves(first, [(label, part) for label, part in plot.parts if isinstance(part, Curves)])
            if isinstance(first, Stack):
                return _stack([(label, part) for label, part in plot.parts if isinstance(part, Stack)])
            return _matrices([(label, part) for label, part in plot.parts if isinstance(part, Matrices)])
    raise AssertionError(f"no chart for {type(plot).__name__}")


# --- what charts have in common


def _number(value: float) -> float | None:
    """Five digits of a value; None where it is not finite."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _values(rows: Iterable[Spec]) -> Spec:
    return {"values": list(rows)}


def _tips(numbers: Sequence[str], **titles: str) -> list[Spec]:
    """What a pointer is told: fields with their titles, `numbers` with four digits; no field without a title."""
    return [
        {"field": field, "title": title, **({"type": "quantitative", "format": ".4~g"} if field in numbers else {})}
        for field, title in titles.items()
        if title
    ]


def _colour(labels: Sequence[str], styles: Sequence[int], field: str = "series", **legend: Any) -> Spec:
    return {
        "field": field,
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(labels), "range": [COLOURS[style % len(COLOURS)] for style in styles]},
        "legend": {"columns": _columns(labels), **_long(labels), **legend} if any(labels) else None,
    }


def _long(labels: Sequence[str]) -> Spec:
    return {"labelLimit": _LONGEST} if max(map(len, labels)) * 6 > _LONGEST else {}


def _columns(labels: Sequence[str]) -> int:
    """Columns of a legend that have room below one drawing."""
    return max(1, min(4, len(labels), int(WIDTH // (40 + 6.5 * max(map(len, labels), default=1)))))


def _picking(field: str) -> Spec:
    """The parameter of what is selected in a legend: of the layer of this name."""
    select = {"type": "point", "fields": [field]}
    return {"name": "picked", "select": select, "bind": "legend", "views": ["picking"]}


def _faded(opacity: float = 1.0) -> Spec:
    return {"condition": {"param": "picked", "value": opacity}, "value": 0.1 * opacity}


def _x(label: str, **more: Any) -> Spec:
    return {"field": "x", "type": "quantitative", "title": label or None, **more}


def _round_axis() -> Spec:
    return {"axis": {"tickMinStep": 1, "format": "d", "grid": False}, "scale": {"nice": False, "zero": False}}


def _in_panels(spec: Spec, titles: Sequence[str]) -> Spec:
    """A chart, or one for each title side by side on common axes."""
    if not any(titles):
        return spec
    outside: Spec = {key: spec.pop(key) for key in ("data", "transform", "params") if key in spec}
    spec |= {"width": NARROW, "height": HEIGHT * 3 // 4}
    facet = {"field": "panel", "type": "nominal", "title": None, "sort": list(titles)}
    return {**outside, "facet": facet, "columns": min(_COLUMNS, len(titles)), "spec": spec}


_CLIENT = {"name": "client", "value": None}
_IS_CLIENT = "client !== null && datum.client === client"


# --- lines


def _curves(plot: Curves, panels: Sequence[tuple[str, Curves]]) -> Spec:
    everything = [(title, curve) for title, part in panels for curve in part.curves]
    rows = [row for number, (title, curve) in enumerate(everything) for row in _rows(plot, number, title, curve)]
    many = len(everything) > _MANY and not plot.single_client
    main, dash = _curve_encoding(plot, everything, rows)
    x_and_looks = {channel: part for channel, part in main.items() if channel != "y"}
    layers = _band(everything, x_and_looks, plot.y_label)
    line: Spec = {"type": "line", "strokeWidth": 1 if many else 1.8}
    looks = {**main, "strokeDash": dash, "opacity": _faded()}
    layers.append({"name": "picking", "mark": line, "encoding": looks})
    if max((len(curve.x) for _, curve in everything), default=0) <= _DOTTED:
        dot = {"type": "point", "filled": True, "size": 12 if many else 22}
        layers.append({"mark": dot, "encoding": {**main, "opacity": _faded()}})
    if any(curve.mark is not None for _, curve in everything):
        ring = {"type": "point", "size": 20 if many else 90, "strokeWidth": 1.5}
        best = {"transform": [{"filter": "datum.best"}], "mark": ring}
        layers.append({**best, "encoding": {**main, "opacity": _faded()}})
    present = rows[0].keys() if rows else ()
    numbers = ["y", *([] if plot.x_names else ["x"])]
    tips = _tips(numbers, series="of", panel="in", client="client", x=plot.x_label, y=plot.y_label)
    hover = {"type": "point", "filled": True, "size": 110, "opacity": 0}
    told = {"x": main["x"], "y": main["y"], "detail": main["detail"]}
    told["tooltip"] = [tip for tip in tips if tip["field"] in present and rows[0][tip["field"]] != ""]
    layers.append({"name": HOVER, "mark": hover, "encoding": told})
    spec: Spec = {"data": _values(rows), "width": WIDTH, "height": HEIGHT, "layer": layers}
    spec["params"] = [_picking("series")]
    if plot.single_client:
        spec["params"].append(_choice(rows))
        spec["transform"] = [{"filter": _IS_CLIENT}]
    elif "client" in present:
        chosen = {"type": "point", "filled": True, "size": 90, "opacity": 1}
        layers.append({"transform": [{"filter": _IS_CLIENT}], "mark": chosen, "encoding": main})
        spec["params"].append(_CLIENT)
    return _in_panels(spec, [title for title, _ in panels])


def _curve_encoding(plot: Curves, everything: Sequence[tuple[str, Curve]], rows: Sequence[Spec]) -> tuple[Spec, Spec]:
    """The encoding of all marks of curves, and the dashes of lines: an entry of the legend for each label."""
    firsts = {curve.label: curve for _, curve in reversed(everything)}
    looks = {label: firsts[label] for label in dict.fromkeys(curve.label for _, curve in everything)}
    colour = _colour(list(looks), [curve.style for curve in looks.values()], symbolType="stroke")
    y: Spec = {"field": "y", "type": "quantitative", "title": plot.y_label, "scale": {"zero": plot.zero}}
    if plot.percent:
        y["scale"] |= _percent_domain(rows)
    dash = {
        "field": "series",
        "type": "nominal",
        "title": None,
        "legend": colour["legend"],
        "scale": {"domain": list(looks), "range": [_dash(curve) for curve in looks.values()]},
    }
    return {"x": _curve_x(plot), "y": y, "color": colour, "detail": {"field": "curve", "type": "nominal"}}, dash


def _choice(rows: Sequence[Spec]) -> Spec:
    """The parameter by which a reader chooses the client that a chart shows."""
    clients = sorted({row["client"] for row in rows})
    return {"name": "client", "value": clients[0], "bind": {"input": "select", "options": clients, "name": "client "}}


def _rows(plot: Curves, number: int, title: str, curve: Curve) -> Iterable[Spec]:
    """The rows of a curve; only known bands, the best point and clients have what stands for these."""
    of_clients = curve.points is not None and not plot.x_names
    for place, (x, y) in enumerate(zip(curve.x.tolist(), curve.y.tolist(), strict=True)):
        row: Spec = {"curve": number, "series": curve.label}
        row["x"] = plot.x_names[int(x) - 1] if plot.x_names else _number(x)
        row["y"] = _number(y)
        if curve.low is not None and curve.high is not None:
            row |= {"low": _number(curve.low[place]), "high": _number(curve.high[place])}
        if place == curve.mark:
            row["best"] = 1
        if title:
            row["panel"] = title
        if curve.client is not None:
            row["client"] = curve.client
        elif of_clients and curve.points is not None:
            row["client"] = int(curve.points[place])
        yield row


def _curve_x(plot: Curves) -> Spec:
    if plot.x_names:
        angle = -40 if sum(map(len, plot.x_names)) * 7 > WIDTH else 0
        names: Spec = {"sort": list(plot.x_names), "axis": {"labelAngle": angle}}
        return {"field": "x", "type": "ordinal", "title": plot.x_label, **names}
    if plot.by_round:
        return _x(plot.x_label, **_round_axis())
    axis: Spec = {"grid": False}
    if plot.x_ticks:
        axis |= {"values": list(plot.x_ticks), "format": "d"}
    elif plot.x_log:
        axis |= {"format": "~g", "tickCount": 5}
    return _x(plot.x_label, axis=axis, scale={"type": "log", "nice": False} if plot.x_log else {"zero": False})


def _percent_domain(rows: Sequence[Spec]) -> Spec:
    """An axis of shares that ends at 100 %, where rounding its ends outwards would go beyond."""
    known = [row[name] for row in rows for name in ("y", "low", "high") if row.get(name) is not None]
    return {"domainMax": 100} if known and max(known) > 90 else {}


def _dash(curve: Curve) -> Sequence[float]:
    return [1.5, 3] if curve.thin else _DASHES[(curve.style + curve.style // len(COLOURS)) % len(_DASHES)]


def _band(everything: Sequence[tuple[str, Curve]], encoding: Spec, y_label: str) -> list[Spec]:
    """The bands of curves: areas, or a bar for each known round where a curve has one or two."""
    counts = [0 if curve.low is None else int((~np.isnan(curve.low)).sum()) for _, curve in everything]
    few = [number for number, count in enumerate(counts) if 0 < count <= 2]
    if not any(counts):
        return []
    sides: Spec = {"y": {"field": "low", "type": "quantitative", "title": y_label}, "y2": {"field": "high"}}
    known, is_few = "isValid(datum.low)", f"indexof({few}, datum.curve) >= 0"
    area: Spec = {
        "transform": [{"filter": f"{known} && !({is_few})" if few else known}],
        "mark": {"type": "area"},
        "encoding": {**encoding, **sides, "opacity": _faded(0.18)},
    }
    bar: Spec = {
        "transform": [{"filter": f"{known} && {is_few}"}],
        "mark": {"type": "rule", "strokeWidth": 4},
        "encoding": {**encoding, **sides, "opacity": _faded(0.35)},
    }
    return [area, *([bar] if few else [])]


# --- bars


def _stack(panels: Sequence[tuple[str, Stack]]) -> Spec:
    first = panels[0][1]
    labels = list(first.parts)
    of = "of" if any(title for title, _ in panels) else ""
    rows: list[Spec] = []
    for title, plot in panels:
        for place, (part, values) in enumerate(plot.parts.items()):
            for x, value in zip(plot.names or plot.x.tolist(), values.tolist(), strict=True):
                row: Spec = {"x": x, "part": part, "place": place, "value": _number(value)}
                row |= {} if isinstance(x, str) else {"from": x - 0.5, "to": x + plot.width - 0.5}
                rows.append(row | ({"panel": title} if title else {}))
    where: Spec = {"x": {"field": "x", "type": "ordinal", "sort": list(first.names), "title": first.x_label or None}}
    if first.names:
        where["x"]["axis"] = {"labelAngle": 0 if len(first.names) < 6 else -40}
    else:
        start = {"field": "from", "type": "quantitative", "bin": "binned", "title": first.x_label}
        where = {"x": start | _round_axis(), "x2": {"field": "to"}}
    y: Spec = {"field": "value", "type": "quantitative", "title": first.y_label, "stack": "zero"}
    if first.top:
        y["scale"] = {"domain": [0, max(part.top or 0 for _, part in panels)], "nice": False}
    encoding = {
        **where,
        "y": y,
        "color": _colour(labels, range(len(labels)), "part", symbolType="square"),
        "order": {"field": "place", "type": "quantitative"},
        "opacity": _faded(),
        "tooltip": _tips(["value"], panel=of, part="part", x=first.x_label or "of", value=first.y_label),
    }
    bar = {"name": "picking", "mark": {"type": "bar", "clip": bool(first.top)}, "encoding": encoding}
    spec = {"data": _values(rows), "params": [_picking("part")], "width": WIDTH, "height": HEIGHT, **bar}
    return _in_panels(spec, [title for title, _ in panels])


def _bars(plot: Bars) -> Spec:
    rows: list[Spec] = [dict(zip(("client", "panel", "x", "part", "value"), bar, strict=True)) for bar in plot.bars]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    titles = list(dict.fromkeys(row["panel"] for row in rows))
    angle = -40 if sum(map(len, plot.names)) * 7 > WIDTH else 0
    encoding: Spec = {
        "x": {
            "field": "x",
            "type": "ordinal",
            "title": plot.x_label,
            "scale": {"domain": list(plot.names)},
            "axis": {"labelAngle": angle},
        },
        "xOffset": {"field": "part", "sort": parts},
        "y": {"field": "value", "type": "quantitative", "title": plot.y_label},
        "color": _colour(parts, range(len(parts)), "part", symbolType="square"),
        "opacity": _faded(),
        "tooltip": _tips([], client="client", x=plot.x_label, part="part", value=plot.y_label),
    }
    bars = {"name": "picking", "mark": "bar", "encoding": encoding}
    spec: Spec = {"data": _values(rows), "width": WIDTH, "height": HEIGHT, "layer": [bars]}
    spec |= {"params": [_picking("part"), _choice(rows)], "transform": [{"filter": _IS_CLIENT}]}
    return _in_panels(spec, titles if len(titles) > 1 else [])


# --- matrices


def _matrices(parts: Sequence[tuple[str, Matrices]]) -> Spec:
    """Matrices on one scale of colours."""
    panels = [
        (" ".join(filter(None, (title, panel.title))), part, panel, _shown(panel, part.hide_diagonal))
        for title, part in parts
        for panel in part.panels
    ]
    width = WIDTH if len(panels) == 1 else NARROW
    colour = _cell_colour(parts[0][1], [values for _, _, _, values in panels])
    charts = [_matrix(*panel, colour, width) for panel in panels]
    for number, each in enumerate(charts):
        for layer in each["layer"][1:]:
            layer["name"] += str(number)  # Vega-Lite names the data of a layer after it
    of_clients = {"params": [_CLIENT]} if any(plot.row_label == "client" for _, plot in parts) else {}
    if len(charts) == 1:
        return {**of_clients, **charts[0]}
    resolve = {"scale": {"color": "shared"}}
    return {**of_clients, "concat": charts, "columns": min(_COLUMNS, len(charts)), "resolve": resolve, "spacing": 18}


def _shown(panel: Panel, hide_diagonal: bool) -> np.ndarray:
    """The values that are drawn, NaN elsewhere."""
    values = np.array(panel.values, np.float64)
    if hide_diagonal:
        np.fill_diagonal(values, np.nan)
    return values


def _cell_colour(plot: Matrices, shown: Sequence[np.ndarray]) -> Spec:
    if plot.categories:
        known = {int(value) for values in shown for value in values[np.isfinite(values)]}
        labels = [f"{plot.value_label} {plot.categories[place]}" for place in sorted(known)]
        return _colour(labels, sorted(known), "value", symbolType="square")
    values = np.concatenate([each[np.isfinite(each)] for each in shown])
    low, high = plot.limits or ((float(values.min()), float(values.max())) if len(values) else (0.0, 1.0))
    scale = {"domain": [low, high if high > low else low + 1], "range": _CIVIDIS, "clamp": True}
    legend = {"direction": "horizontal", "gradientLength": 150, "gradientThickness": 9, "titleOrient": "left"}
    return {"field": "value", "type": "quantitative", "title": plot.value_label, "scale": scale, "legend": legend}


def _matrix(title: str, plot: Matrices, panel: Panel, values: np.ndarray, colour: Spec, width: int) -> Spec:
    of_clients = plot.row_label == "client"
    field = "client" if of_clients else "row"
    rows = []
    for row, column in np.argwhere(np.isfinite(values)).tolist():
        value = values[row, column]
        cell: Spec = {field: panel.rows[row], "column": panel.columns[column]}
        cell["value"] = f"{plot.value_label} {plot.categories[int(value)]}" if plot.categories else _number(value)
        rows.append(cell)
    height = int(np.clip(_CELL * len(panel.rows), _LOWEST, _HIGHEST))
    y = _names_axis(field, plot.row_label, panel.rows, height // 12)
    longest = max((len(str(name)) for name in panel.columns), default=1)
    x = _names_axis("column", plot.column_label, panel.columns, int(width // (14 if longest > 6 else 7 * longest + 8)))
    if longest > 6:
        x["axis"]["labelAngle"] = -40
    numbers = [] if plot.categories else ["value"]
    tips = _tips(numbers, **{field: plot.row_label}, column=f"{plot.column_label} ", value=plot.value_label)
    cells = {"mark": {"type": "rect"}, "encoding": {"x": x, "y": y, "color": colour, "tooltip": tips}}
    layers = [cells]
    if of_clients:
        layers.append(
            {
                "name": HOVER,
                "transform": [
                    {"filter": _IS_CLIENT},
                    {"aggregate": [{"op": "count", "as": "cells"}], "groupby": ["client"]},
                ],
                "mark": {"type": "rect", "filled": False, "stroke": COLOURS[1], "strokeWidth": 2},
                "encoding": {"y": y, "x": {"value": 0}, "x2": {"value": width}},
            }
        )
    spec: Spec = {"data": _values(rows), "width": width, "height": height, "layer": layers}
    return {**spec, "title": title} if title else spec


def _names_axis(field: str, label: str, names: Sequence[str | int], most: int) -> Spec:
    """An axis of all names in their order, of which at most so many are written."""
    written = names[:: max(1, -(-len(names) // max(most, 1)))]
    axis = {"values": list(written), "labelAngle": 0, "ticks": False, "grid": False}
    return {"field": field, "type": "ordinal", "title": label, "scale": {"domain": list(names)}, "axis": axis}


# --- points


def _dots(plot: Dots) -> Spec:
    rows = [
        {"row": row, "client": client, "series": label, "x": _number(values[place])}
        for label, values in plot.series.items()
        for place, (row, client) in enumerate(zip(plot.rows, plot.clients, strict=True))
    ]
    labels = list(plot.series)
    y: Spec = {
        "field": "row",
        "type": "ordinal",
        "title": plot.row_label,
        "sort": list(plot.rows),
        "axis": {"grid": True, "ticks": False},
    }
    x = _x(plot.x_label, axis={"grid": False})
    shapes = [_SHAPES[style % len(_SHAPES)] for style in plot.styles]
    colour = _colour(labels, plot.styles)
    shape = {"field": "series", "type": "nominal", "title": None, "legend": colour["legend"]}
    shape["scale"] = {"domain": labels, "range": shapes}
    main = {"x": x, "y": y, "color": colour, "shape": shape}
    tips = _tips(["x"], series="run", row=plot.row_label, x=plot.x_label)
    dots = {"mark": {"type": "point", "filled": True, "size": 34}, "name": "picking"}
    picked = {"type": "point", "filled": True, "size": 120}
    return {
        "data": _values(rows),
        "params": [_picking("series"), _CLIENT],
        "width": WIDTH,
        "height": max(100, _ROW * len(plot.rows)),
        "layer": [
            {"data": _values([{"x": 0}]), "mark": {"type": "rule", "color": INK, "opacity": 0.6}, "encoding": {"x": x}},
            {**dots, "encoding": {**main, "opacity": _faded(), "tooltip": tips}},
            {"transform": [{"filter": _IS_CLIENT}], "mark": picked, "encoding": main},
        ],
    }


def _clouds(plot: Clouds) -> Spec:
    rows = [row for cloud in plot.clouds for row in _cloud_rows(cloud)]
    axis = {"grid": False}
    x = _x(plot.x_label, axis=axis, scale={"zero": False})
    place = {"x": x, "y": x | {"field": "y", "title": plot.y_label}}
    classes = sorted({int(label) for cloud in plot.clouds for label in cloud.classes})
    colour = _colour([str(label) for label in classes], classes, "label")
    colour |= {"title": "class", "legend": {"columns": 8, "symbolType": "circle"} if len(classes) <= 24 else None}
    size = {"condition": {"test": "datum.client < 0", "value": 110}, "value": 22}
    tips = _tips(["x", "y"], whose="of", label="class", x=plot.x_label, y=plot.y_label)
    looks = {**place, "color": colour, "shape": _shape_of_clients(rows), "size": size, "opacity": _faded()}
    points = {"mark": {"type": "point", "filled": True}, "name": "picking"}
    names = {"type": "text", "align": "left", "dx": 6, "dy": -6, "color": INK}
    ring = {"type": "point", "size": 90, "color": INK}
    spec: Spec = {
        "data": _values(rows),
        "params": [_picking("label"), _CLIENT],
        "width": WIDTH,
        "height": HEIGHT,
        "layer": [
            {**points, "encoding": {**looks, "tooltip": tips}},
            {
                "transform": [{"filter": "datum.named"}],
                "mark": names,
                "encoding": {**place, "text": {"field": "label"}},
            },
            {"transform": [{"filter": _IS_CLIENT}], "mark": ring, "encoding": place},
        ],
    }
    return _in_panels(spec, [cloud.title for cloud in plot.clouds])


def _shape_of_clients(rows: list[Spec]) -> Spec:
    """A shape for the server and each client where they are few; otherwise all clients share one."""
    if len({row["client"] for row in rows}) > len(_SHAPES):
        for row in rows:
            row["whose"] = "server" if row["client"] < 0 else "a client"
    whose = list(dict.fromkeys(row["whose"] for row in sorted(rows, key=lambda row: int(row["client"]))))
    clients = [name for name in whose if name != "server"]
    shapes = {"server": _STAR, **dict(zip(clients, _SHAPES, strict=False))}
    scale = {"domain": whose, "range": [shapes[name] for name in whose]}
    legend = {"columns": 4, "symbolFillColor": INK, "symbolStrokeColor": INK}
    return {"field": "whose", "type": "nominal", "title": None, "scale": scale, "legend": legend}


def _cloud_rows(cloud: Cloud) -> Iterable[Spec]:
    """A row for each point; of each class one point has its name, where no other name is near."""
    named = _named_points(cloud)
    for place, (x, y) in enumerate(cloud.points.tolist()):
        client = int(cloud.clients[place])
        yield {
            "panel": cloud.title,
            "x": _number(x),
            "y": _number(y),
            "label": str(int(cloud.classes[place])),
            "client": client,
            "whose": "server" if client < 0 else f"client {client}",
            "named": int(place in named),
        }


def _named_points(cloud: Cloud) -> set[int]:
    """Of each class the server's point, or the one next to its mean, unless another name is there."""
    room = np.maximum(np.ptp(cloud.points, axis=0), np.finfo(np.float64).tiny)
    places = (cloud.points - cloud.points.min(0)) / room * (NARROW, HEIGHT * 3 // 4)
    found: list[int] = []
    for label in np.unique(cloud.classes).tolist():
        where = np.flatnonzero(cloud.classes == label)
        server = where[cloud.clients[where] < 0]
        middle = places[server if len(server) else where].mean(0)
        place = int(where[np.abs(places[where] - middle).sum(1).argmin()])
        if all((np.abs(places[place] - places[other]) > (14, 12)).any() for other in found):
            found.append(place)
    return set(found)
