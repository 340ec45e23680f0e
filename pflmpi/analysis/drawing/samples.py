"""Draws a dataset: a few samples of each class, and the number of samples of each client and class."""

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image

from pflmpi import atomic
from pflmpi.analysis.drawing.charts import COLOURS, CONFIG, Spec
from pflmpi.analysis.drawing.rendering import render_picture, render_svg
from pflmpi.data.dataset import Dataset

_MOST_SAMPLES = 8  # of a class
_MOST_CLASSES = 20
_MOST_CLIENTS = 60
_SIDE = 52  # pixels of a sample


def draw_samples(dataset: Dataset, path: Path) -> None:
    """Writes a picture, .png or .svg; images are shown as such, tables and sequences as lines over their columns."""
    charts = [_chart_samples(dataset), *([] if dataset.writers is None else [_chart_clients(dataset)])]
    text = render_svg(
        {"hconcat": charts, "config": CONFIG, "spacing": 40, "resolve": {"scale": {"color": "independent"}}}
    )
    atomic.write(path, text.encode() if path.suffix == ".svg" else render_picture(text, ".png"))


def _chart_samples(dataset: Dataset) -> Spec:
    classes, class_names = np.unique(dataset.labels)[:_MOST_CLASSES].tolist(), dataset.own_class_names
    images = dataset.images.ndim == 4 and dataset.images.dtype == np.uint8
    rows: list[Spec] = []
    for label in classes:
        for place, sample in enumerate(np.flatnonzero(dataset.labels == label)[:_MOST_SAMPLES].tolist()):
            row: Spec = {"class": f"class {class_names[label]}", "place": place}
            if images:
                rows.append(row | {"url": _encode_png(dataset.images[sample])})
            else:
                values = dataset.images[sample].reshape(-1).tolist()
                rows += [row | {"column": column, "value": float(value)} for column, value in enumerate(values)]
    more = dataset.num_classes - len(classes)
    title = f"samples of each class{f' ({more} more classes)' * (more > 0)}"
    names = {"type": "ordinal", "sort": [f"class {class_names[label]}" for label in classes], "title": None}
    common: Spec = {"data": {"values": rows}, "title": title}
    if images:
        hidden = {"axis": None, "type": "ordinal"}
        y = {"field": "class", **names, "axis": {"domain": False, "ticks": False}}
        encoding = {"x": {"field": "place", **hidden}, "y": y, "url": {"field": "url", "type": "nominal"}}
        step = {"step": _SIDE}
        mark = {"type": "image", "width": _SIDE - 4, "height": _SIDE - 4}
        return {**common, "width": step, "height": step, "mark": mark, "encoding": encoding}
    encoding = {
        "x": {"field": "column", "type": "quantitative", "axis": None},
        "y": {"field": "value", "type": "quantitative", "axis": None, "scale": {"zero": False}},
    }
    line = {"mark": {"type": "line", "strokeWidth": 1, "color": COLOURS[0]}, "encoding": encoding}
    facet_row = {"field": "class", **names, "header": {"labelAngle": 0, "labelAlign": "left"}}
    facet_column = {"field": "place", "type": "ordinal", "title": None, "header": None}
    return {
        **common,
        "facet": {"row": facet_row, "column": facet_column},
        "spacing": 4,
        "spec": {"width": _SIDE, "height": _SIDE, **line},
    }


def _encode_png(sample: np.ndarray) -> str:
    """A sample [C, H, W] of bytes as a PNG in a data URL; only the first channel unless there are three."""
    pixels = sample.transpose(1, 2, 0) if len(sample) == 3 else sample[0]
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _chart_clients(dataset: Dataset) -> Spec:
    """A heat map of the samples of each client and class."""
    assert dataset.writers is not None
    counts = np.zeros((int(dataset.writers.max()) + 1, dataset.num_classes), np.int64)
    np.add.at(counts, (dataset.writers, dataset.labels), 1)
    shown, class_names = counts[:_MOST_CLIENTS, :_MOST_CLASSES], dataset.own_class_names
    rows = [
        {"client": client, "class": class_names[label], "samples": int(value)}
        for (client, label), value in np.ndenumerate(shown)
    ]
    encoding = {
        "x": {"field": "class", "type": "ordinal", "sort": class_names, "axis": {"labelAngle": 0}},
        "y": {"field": "client", "type": "ordinal"},
        "color": {"field": "samples", "type": "quantitative", "scale": {"scheme": "blues"}},
    }
    title = f"samples of each client{f' (the first {_MOST_CLIENTS})' * (len(counts) > _MOST_CLIENTS)}"
    size = {"width": 300, "height": max(160, 11 * len(shown))}
    return {"data": {"values": rows}, "title": title, "mark": "rect", "encoding": encoding, **size}
