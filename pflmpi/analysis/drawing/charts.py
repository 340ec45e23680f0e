"""Figures as Vega-Lite charts, which pages, notebooks, SVG, PNG and PDF share."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pflmpi.analysis.plots import Bars, Cloud, Clouds, Curve, Curves, Matrices, Multiples, Panel, Plot, Stack

Spec = dict[str, Any]

HOVER = "hover"  # prefix of the names of hover layers, which pictures leave out
WIDTH, NARROW, HEIGHT = 330, 240, 210  # pixels inside the axes; NARROW is the width of one of several panels
INK = "#1a1c1f"
COLOURS = (
    *("#0b3c5d", "#d1495b", "#2f9e6e", "#d98c1f", "#6f4aa5", "#4a9fd0"),
    *("#8a6d3b", "#7b7b7b", "#b0328f", "#7d9a1f", "#1f7f86", "#c9673f"),
)
_DASHES = ([1, 0], [6, 3], [6, 2, 1.5, 2], [1.5, 2.5])
_STAR = "M0,-1L0.23,-0.31L0.95,-0.31L0.36,0.12L0.59,0.81L0,0.38L-0.59,0.81L-0.36,0.12L-0.95,-0.31L-0.23,-0.31Z"
# Cividis, a perceptually uniform scale for the colour-blind too, without its darkest fifth, invisible on dark pages.
_CIVIDIS = ["#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"]

_LONGEST = 250  # pixels of a label in a legend
_MOST_NAMES = 25  # labels on an axis
_MOST_TIPS = 16  # curves in a tooltip
_MANY = 12  # curves; if there are more, they are drawn thin
_DOTTED = 24  # points of a curve; if there are more, they have no dots
_COLUMNS = 3  # panels side by side
_CELL, _LOWEST, _HIGHEST = 13, 110, 340  # pixels: height of a row of a matrix, limits of the height of all rows

_TEXT = {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"}
# Measuring texts to find out which ones overlap would take half of the rendering time.
_UNMEASURED = {"labelLimit": 0, "titleLimit": 0, "labelOverlap": False, "labelBound": False}
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


def build_chart(plot: Plot) -> Spec:
    """The Vega-Lite chart of a figure, with its data.

    Its parameters are `picked`, the selected entries of the legend, and `client`, the highlighted client.
    """
    panels: Any = plot.parts if isinstance(plot, Multiples) else [("", plot)]  # all of one kind
    match panels[0][1]:
        case Curves():
            drawing = _curves(panels)
        case Stack():
            drawing = _stack(panels)
        case Matrices():
            drawing = _matrices(panels)
        case Clouds() as clouds:
            drawing = _clouds(clouds)
        case Bars() as bars:
            drawing = _bars(bars)
        case other:
            raise AssertionError(f"no chart for {type(other).__name__}")
    return {"description": f"{plot.title}. {plot.caption}", **drawing, "config": CONFIG}


# --- what charts have in common

_CLIENT = {"name": "client", "value": None}
_ZOOM: Spec = {  # Ctrl and the wheel (without Ctrl it scrolls the page), or a pinch, zoom; a drag moves
    "name": f"{HOVER}_zoom",
    "select": {"type": "interval", "zoom": "wheel![event.ctrlKey || event.metaKey]"},
    "bind": "scales",
    "views": ["picking"],
}
_ROUND_AXIS: Spec = {"axis": {"tickMinStep": 1, "format": "d", "grid": False}, "scale": {"nice": False, "zero": False}}
_IS_CLIENT = "client !== null && datum.client === client"


def _number(value: float) -> float | None:
    """A value with five significant digits; None if it is not finite."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _tips(numbers: Sequence[str], **titles: str) -> list[Spec]:
    """Tooltips: `titles` by field, of which `numbers` are shown with four digits; fields without title are dropped."""
    return [
        {"field": field, "title": title, **({"type": "quantitative", "format": ".4~g"} if field in numbers else {})}
        for field, title in titles.items()
        if title
    ]


def _nominal(field: str, domain: Sequence[str], values: Sequence[Any], legend: Spec | None) -> Spec:
    scale = {"domain": list(domain), "range": list(values)}
    return {"field": field, "type": "nominal", "title": None, "scale": scale, "legend": legend}


def _colour(labels: Sequence[str], styles: Sequence[int], field: str = "series", **legend: Any) -> Spec:
    """A colour encoding; its legend has as many columns as fit below one chart."""
    longest = max(map(len, labels), default=1)
    columns = max(1, min(4, len(labels), int(WIDTH // (40 + 6.5 * longest))))
    limit = {"labelLimit": _LONGEST} if longest * 6 > _LONGEST else {}
    colours = [COLOURS[style % len(COLOURS)] for style in styles]
    return _nominal(field, labels, colours, {"columns": columns, **limit, **legend} if any(labels) else None)


def _picking(field: str) -> Spec:
    """The parameter of the legend selection, bound to the layer named "picking"."""
    select = {"type": "point", "fields": [field], "toggle": "true"}
    return {"name": "picked", "select": select, "bind": "legend", "views": ["picking"]}


def _faded(opacity: float = 1.0) -> Spec:
    """The opacity encoding that hides what is not selected in the legend."""
    return {"condition": {"param": "picked", "value": opacity}, "value": 0}


def _quantity(field: str, label: str, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": label or None, **more}


def _label_names(names: Sequence[str]) -> Spec:
    """The axis of names: inclined if they would overlap, and with only some of many."""
    axis: Spec = {"labelAngle": -40 if sum(map(len, names)) * 7 > WIDTH else 0}
    if len(names) > _MOST_NAMES:
        axis["values"] = list(names[:: -(-len(names) // _MOST_NAMES)])
    return axis


def _in_panels(spec: Spec, titles: Sequence[str]) -> Spec:
    """A single chart without titles, or one facet for each title on common axes."""
    if not any(titles):
        return {**spec, "width": WIDTH, "height": HEIGHT}
    shared = ("data", "transform", "params")  # which a facet has outside of its panels
    panel: Spec = {key: part for key, part in spec.items() if key not in shared}
    panel |= {"width": NARROW, "height": HEIGHT * 3 // 4}
    facet = {"field": "panel", "type": "nominal", "title": None, "sort": list(titles)}
    outside: Spec = {key: spec[key] for key in shared if key in spec}
    return {**outside, "facet": facet, "columns": min(_COLUMNS, len(titles)), "spec": panel}


def _client_menu(rows: Sequence[Spec]) -> Spec:
    """The parameter `client`, bound to a menu of the clients in the data."""
    clients = sorted({row["client"] for row in rows})
    return {"name": "client", "value": clients[0], "bind": {"input": "select", "options": clients, "name": "client "}}


# --- lines


def _curves(panels: Sequence[tuple[str, Curves]]) -> Spec:
    plot = panels[0][1]
    curves = [(title, curve) for title, part in panels for curve in part.curves]
    rows = [row for number, (title, curve) in enumerate(curves) for row in _points(plot, number, title, curve)]
    many = len(curves) > _MANY and not plot.single_client
    marks, dash = _curve_encoding(plot, [curve for _, curve in curves], rows)
    if all(title == curve.label for title, curve in curves):  # the titles of panels replace the legend
        marks["color"]["legend"] = dash["legend"] = None
    fading = {**marks, "opacity": _faded()}
    layers = _band([curve for _, curve in curves], marks, plot.y_label)
    line: Spec = {"type": "line", "strokeWidth": 1 if many else 1.8}
    layers.append({"name": "picking", "mark": line, "encoding": {**fading, "strokeDash": dash}})
    if max((len(curve.x) for _, curve in curves), default=0) <= _DOTTED:
        layers.append({"mark": {"type": "point", "filled": True, "size": 12 if many else 22}, "encoding": fading})
    if any(curve.mark is not None for _, curve in curves):
        ring = {"type": "point", "size": 20 if many else 90, "strokeWidth": 1.5}
        layers.append({"transform": [{"filter": "datum.best"}], "mark": ring, "encoding": fading})
    layers.append(_hover(plot, curves, rows, marks))
    zoom = [] if plot.x_names else [_ZOOM]
    spec: Spec = {"data": {"values": rows}, "layer": layers, "params": [_picking("series"), *zoom]}
    if plot.single_client:
        spec |= {"params": [*spec["params"], _client_menu(rows)], "transform": [{"filter": _IS_CLIENT}]}
    elif rows and "client" in rows[0]:
        chosen = {"type": "point", "filled": True, "size": 90, "opacity": 1}
        layers.append({"transform": [{"filter": _IS_CLIENT}], "mark": chosen, "encoding": marks})
        spec["params"].append(_CLIENT)
    return _in_panels(spec, [title for title, _ in panels])


def _hover(plot: Curves, curves: Sequence[tuple[str, Curve]], rows: Sequence[Spec], marks: Spec) -> Spec:
    """An invisible layer with tooltips: the values of all curves in a round, or of one point if they are too many."""
    own_panels = all(title == curve.label for title, curve in curves)
    labels = list(dict.fromkeys(curve.label for _, curve in curves))
    present = {name for name, value in rows[0].items() if value != ""} if rows else set()
    titles = {"series": "" if own_panels else "of", "panel": "of" if own_panels else "in", "client": "client"}
    unique = len({(title, curve.label, curve.client) for title, curve in curves}) == len(curves)
    if not plot.by_round or not unique or len(labels) > _MOST_TIPS:
        tips = _tips(["y", *([] if plot.x_names else ["x"])], **titles, x=plot.x_label, y=plot.y_label)
        encoding = {name: marks[name] for name in ("x", "y", "detail")}
        encoding["tooltip"] = [tip for tip in tips if tip["field"] in present]
        return {
            "name": HOVER,
            "mark": {"type": "point", "filled": True, "size": 110, "opacity": 0},
            "encoding": encoding,
        }
    keys = [name for name in ("panel", "client") if name in present]
    place = {"calculate": f"indexof({json.dumps(labels)}, datum.series)", "as": "place"}
    values = {"pivot": "place", "value": "y", "groupby": ["x", *keys]}  # fields "0", "1", ..., as labels are any text
    tips = _tips([], **{name: titles[name] for name in keys}, x=plot.x_label)
    fields = {str(number): label or plot.y_label for number, label in enumerate(labels)}
    tips += _tips(list(fields), **fields)
    width = max(2, WIDTH // max(1, len({row["x"] for row in rows})))
    return {
        "name": HOVER,
        "transform": [{"filter": {"param": "picked"}}, place, values],
        "mark": {"type": "rule", "strokeWidth": width, "opacity": 0},
        "encoding": {"x": marks["x"], "tooltip": tips},
    }


def _curve_encoding(plot: Curves, curves: Sequence[Curve], rows: Sequence[Spec]) -> tuple[Spec, Spec]:
    """The encoding shared by all marks of curves, and the dash encoding of lines; one legend entry for each label."""
    firsts: dict[str, Curve] = {}
    for curve in curves:
        firsts.setdefault(curve.label, curve)
    colour = _colour(list(firsts), [curve.style for curve in firsts.values()], symbolType="stroke")
    dash = _nominal("series", list(firsts), [_dash(curve) for curve in firsts.values()], colour["legend"])
    drawn = [row[name] for row in rows for name in ("y", "low", "high") if row.get(name) is not None]
    # A nice axis of percentages would end above 100 %.
    top = {"domainMax": 100} if plot.percent and drawn and max(drawn) > 90 else {}
    y = _quantity("y", plot.y_label, scale={"zero": plot.zero, **top})
    return {"x": _curve_x(plot), "y": y, "color": colour, "detail": {"field": "curve", "type": "nominal"}}, dash


def _points(plot: Curves, number: int, title: str, curve: Curve) -> Iterable[Spec]:
    """The data rows of a curve, with the fields of bands, of the best point and of clients only if it has them."""
    clients = None if curve.points is None or plot.x_names else curve.points.astype(int).tolist()
    for place, (x, y) in enumerate(zip(curve.x.tolist(), curve.y.tolist(), strict=True)):
        row: Spec = {"curve": number, "series": curve.label}
        row |= {"x": plot.x_names[int(x) - 1] if plot.x_names else _number(x), "y": _number(y)}
        if curve.low is not None and curve.high is not None:
            row |= {"low": _number(curve.low[place]), "high": _number(curve.high[place])}
        if place == curve.mark:
            row["best"] = 1
        if title:
            row["panel"] = title
        if curve.client is not None or clients:
            row["client"] = curve.client if clients is None else clients[place]
        yield row


def _curve_x(plot: Curves) -> Spec:
    if plot.x_names:
        names: Spec = {"sort": list(plot.x_names), "axis": _label_names(plot.x_names)}
        return {"field": "x", "type": "ordinal", "title": plot.x_label, **names}
    if plot.by_round:
        return _quantity("x", plot.x_label, **_ROUND_AXIS)
    axis: Spec = {"grid": False}
    if plot.x_ticks:
        axis |= {"values": list(plot.x_ticks), "format": "d"}
    elif plot.x_log:
        axis |= {"format": "~g", "tickCount": 5}
    scale = {"type": "log", "nice": False} if plot.x_log else {"zero": False}
    return _quantity("x", plot.x_label, axis=axis, scale=scale)


def _dash(curve: Curve) -> Sequence[float]:
    return [1.5, 3] if curve.thin else _DASHES[(curve.style + curve.style // len(COLOURS)) % len(_DASHES)]


def _band(curves: Sequence[Curve], marks: Spec, y_label: str) -> list[Spec]:
    """Layers for bands: areas, but vertical lines for curves with a band at only one or two points."""
    counts = [0 if curve.low is None else int((~np.isnan(curve.low)).sum()) for curve in curves]
    if not any(counts):
        return []
    few = [number for number, count in enumerate(counts) if 0 < count <= 2]
    sides = {**marks, "y": _quantity("low", y_label), "y2": {"field": "high"}}
    is_few = f"indexof({few}, datum.curve) >= 0"

    def layer(condition: str, mark: Spec, opacity: float) -> Spec:
        condition = f"isValid(datum.low) && {condition}"
        return {"transform": [{"filter": condition}], "mark": mark, "encoding": {**sides, "opacity": _faded(opacity)}}

    area = layer(f"!({is_few})", {"type": "area"}, 0.18)
    return [area, *([layer(is_few, {"type": "rule", "strokeWidth": 4}, 0.35)] if few else [])]


# --- bars


def _stack(panels: Sequence[tuple[str, Stack]]) -> Spec:
    first = panels[0][1]
    labels = list(first.parts)
    rows: list[Spec] = []
    for title, plot in panels:
        for place, (part, values) in enumerate(plot.parts.items()):
            for x, value in zip(plot.names or plot.x.tolist(), values.tolist(), strict=True):
                row: Spec = {"x": x, "part": part, "place": place, "value": _number(value)}
                row |= {} if isinstance(x, str) else {"from": x - 0.5, "to": x + plot.width - 0.5}
                rows.append(row | ({"panel": title} if title else {}))
    if first.names:
        x_axis: Spec = {"axis": {"labelAngle": 0 if len(first.names) < 6 else -40}, "sort": list(first.names)}
        where: Spec = {"x": {"field": "x", "type": "ordinal", "title": first.x_label or None, **x_axis}}
    else:
        where = {"x": _quantity("from", first.x_label, bin="binned", **_ROUND_AXIS), "x2": {"field": "to"}}
    y = _quantity("value", first.y_label, stack="zero")
    tops = [part.top or 0.0 for _, part in panels]
    if cut := all(tops):
        y["scale"] = {"domain": [0, max(tops)], "nice": False}
    of = "of" if panels[0][0] else ""
    encoding = {
        **where,
        "y": y,
        "color": _colour(labels, range(len(labels)), "part", symbolType="square"),
        "order": {"field": "place", "type": "quantitative"},
        "opacity": _faded(),
        "tooltip": _tips(["value"], panel=of, part="part", x=first.x_label or "of", value=first.y_label),
    }
    bar = {"name": "picking", "mark": {"type": "bar", "clip": cut}, "encoding": encoding}
    return _in_panels({"data": {"values": rows}, "params": [_picking("part")], **bar}, [title for title, _ in panels])


def _bars(plot: Bars) -> Spec:
    rows: list[Spec] = [dict(zip(("client", "panel", "x", "part", "value"), bar, strict=True)) for bar in plot.bars]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    titles = list(dict.fromkeys(row["panel"] for row in rows))
    x = {"field": "x", "type": "ordinal", "title": plot.x_label, "scale": {"domain": list(plot.names)}}
    encoding: Spec = {
        "x": {**x, "axis": _label_names(plot.names)},
        "xOffset": {"field": "part", "sort": parts},
        "y": _quantity("value", plot.y_label),
        "color": _colour(parts, range(len(parts)), "part", symbolType="square"),
        "opacity": _faded(),
        "tooltip": _tips([], client="client", x=plot.x_label, part="part", value=plot.y_label),
    }
    spec: Spec = {"data": {"values": rows}, "layer": [{"name": "picking", "mark": "bar", "encoding": encoding}]}
    spec |= {"params": [_picking("part"), _client_menu(rows)], "transform": [{"filter": _IS_CLIENT}]}
    return _in_panels(spec, titles if len(titles) > 1 else [])


# --- matrices


def _matrices(parts: Sequence[tuple[str, Matrices]]) -> Spec:
    """Heat maps on one colour scale, or on one each."""
    panels = [
        (" ".join(filter(None, (title, panel.title))), plot, panel, panel.drawn_values(plot.hide_diagonal))
        for title, plot in parts
        for panel in plot.panels
    ]
    width = WIDTH if len(panels) == 1 else NARROW
    first, drawn = parts[0][1], [values for _, _, _, values in panels]
    colours = [_cell_colour(first, [values] if first.own_scales else drawn) for values in drawn]
    charts = [_matrix(*panel, colour, width) for panel, colour in zip(panels, colours, strict=True)]
    for number, spec in enumerate(charts):
        for layer in spec["layer"][1:]:
            layer["name"] += str(number)  # Vega-Lite names the data of a layer after it
    of_clients = {"params": [_CLIENT]} if any(plot.row_label == "client" for _, plot in parts) else {}
    if len(charts) == 1:
        return {**of_clients, **charts[0]}
    resolve = {"scale": {"color": "independent" if first.own_scales else "shared"}}
    return {**of_clients, "concat": charts, "columns": min(_COLUMNS, len(charts)), "resolve": resolve, "spacing": 18}


def _cell_colour(plot: Matrices, drawn: Sequence[np.ndarray]) -> Spec:
    values = np.concatenate([panel[np.isfinite(panel)] for panel in drawn])
    if plot.categories:
        present = sorted({int(value) for value in values})
        labels = [f"{plot.value_label} {plot.categories[place]}" for place in present]
        return _colour(labels, present, "value", symbolType="square")
    low, high = plot.limits or ((float(values.min()), float(values.max())) if len(values) else (0.0, 1.0))
    scale = {"domain": [low, high if high > low else low + 1], "range": _CIVIDIS, "clamp": True}
    legend: Spec = {"direction": "horizontal", "gradientLength": 150, "gradientThickness": 9, "titleOrient": "left"}
    if plot.own_scales:  # which may be narrow: 0.9995 is not 1
        legend |= {"values": scale["domain"], "format": ".4~g"}
    return _quantity("value", plot.value_label, scale=scale, legend=legend)


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
    layers: list[Spec] = [{"mark": {"type": "rect"}, "encoding": {"x": x, "y": y, "color": colour, "tooltip": tips}}]
    if of_clients:
        once = {"aggregate": [{"op": "count", "as": "cells"}], "groupby": ["client"]}
        frame = {"type": "rect", "filled": False, "stroke": COLOURS[1], "strokeWidth": 2}
        encoding = {"y": y, "x": {"value": 0}, "x2": {"value": width}}
        layers.append({"name": HOVER, "transform": [{"filter": _IS_CLIENT}, once], "mark": frame, "encoding": encoding})
        if "client" in plot.column_label:
            is_column = {"filter": _IS_CLIENT.replace("datum.client", "datum.column")}
            once = {**once, "groupby": ["column"]}
            encoding = {"x": x, "y": {"value": 0}, "y2": {"value": height}}
            layers.append(
                {"name": f"{HOVER}_column", "transform": [is_column, once], "mark": frame, "encoding": encoding}
            )
    spec: Spec = {"data": {"values": rows}, "width": width, "height": height, "layer": layers}
    return {**spec, "title": title} if title else spec


def _names_axis(field: str, label: str, names: Sequence[str | int], most: int) -> Spec:
    """An ordinal axis of all names, of which at most `most` are labelled."""
    labelled = names[:: max(1, -(-len(names) // max(most, 1)))]
    axis = {"values": list(labelled), "labelAngle": 0, "ticks": False, "grid": False}
    return {"field": field, "type": "ordinal", "title": label, "scale": {"domain": list(names)}, "axis": axis}


# --- points


def _clouds(plot: Clouds) -> Spec:
    rows = [row for cloud in plot.clouds for row in _cloud_points(plot, cloud)]
    axes: Spec = {"axis": {"grid": False}, "scale": {"zero": False, "padding": 12}}
    place = {"x": _quantity("x", plot.x_label, **axes), "y": _quantity("y", plot.y_label, **axes)}
    classes = sorted({int(label) for cloud in plot.clouds for label in cloud.classes})
    names = [plot.name_class(label) for label in classes]
    columns = {"columns": 8} if max(map(len, names)) <= 2 else {}
    colour = _colour(names, classes, "label", symbolType="circle", **columns) | {"title": "class"}
    if len(classes) > 24:
        colour["legend"] = None

    def of_server(server: object, client: object) -> Spec:
        return {"condition": {"test": "datum.client < 0", "value": server}, "value": client}

    marks = {**place, "color": colour, "shape": of_server(_STAR, "circle"), "size": of_server(110, 22)}
    tips = _tips(["x", "y"], client="client (-1: server)", label="class", x=plot.x_label, y=plot.y_label)
    points = {"mark": {"type": "point", "filled": True}, "name": "picking"}
    ring = {"type": "point", "size": 90, "color": INK}
    spec: Spec = {
        "data": {"values": rows},
        "params": [_picking("label"), _ZOOM, _CLIENT],
        "layer": [
            {**points, "encoding": {**marks, "opacity": _faded(), "tooltip": tips}},
            {"transform": [{"filter": _IS_CLIENT}], "mark": ring, "encoding": place},
        ],
    }
    return _in_panels(spec, [cloud.title for cloud in plot.clouds])


def _cloud_points(plot: Clouds, cloud: Cloud) -> Iterable[Spec]:
    for place, (x, y) in enumerate(cloud.points.tolist()):
        name = plot.name_class(int(cloud.classes[place]))
        client = int(cloud.clients[place])
        yield {"panel": cloud.title, "x": _number(x), "y": _number(y), "label": name, "client": client}
