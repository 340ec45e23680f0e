"""Points on a plane, by class and client."""

import numpy as np

from pflmpi.analysis.drawing import style
from pflmpi.analysis.drawing.frame import Axis, Frame, limits
from pflmpi.analysis.drawing.scene import SIZE, Key, Marks, Shape, Text, width_of
from pflmpi.analysis.plots import Cloud, Clouds

_SERVER = -1
_STAR = 5.0  # pixels from the middle of a star to where a name may begin
_TALL = 0.75 * SIZE  # of a digit
_Box = tuple[float, float, float, float]  # left, top, right, bottom


def axes(plot: Clouds) -> tuple[Axis, Axis]:
    """Axes on which all points have room."""
    return (
        limits(plot.x_label, [cloud.points[:, 0] for cloud in plot.clouds]),
        limits(plot.y_label, [cloud.points[:, 1] for cloud in plot.clouds]),
    )


def shapes(plot: Clouds, cloud: Cloud, drawn: Frame) -> list[Shape]:
    """The points of a cloud: colour by class, shape by client, stars for the server; names of classes."""
    found: list[Shape] = []
    places = drawn.places(*cloud.points.T)
    marks = _marks(plot)
    for client in np.unique(cloud.clients).tolist():
        for label in np.unique(cloud.classes[cloud.clients == client]).tolist():
            chosen = (cloud.clients == client) & (cloud.classes == label)
            who = "server" if client == _SERVER else f"client {client}"
            found.append(
                Marks(
                    points=places[chosen],
                    colour=style.colour(label),
                    opacity=style.tint(label),
                    shape=marks[client],
                    radius=6.0 if client == _SERVER else 2.5,
                    label=f"{who}, class {label}",
                )
            )
    return found + _names(cloud, places)


def keys(plot: Clouds) -> tuple[Key, ...]:
    """The legend: the server, and the clients where each has a shape of its own."""
    marks = _marks(plot)
    each = len(set(marks.values()) - {"*"}) == len(marks.keys() - {_SERVER})
    named = {client: "server" if client == _SERVER else f"client {client}" if each else "a client" for client in marks}
    return tuple(
        Key(label=name, colour="ink", shape=shape)
        for name, shape in {named[client]: shape for client, shape in marks.items()}.items()
    )


def _marks(plot: Clouds) -> dict[int, str]:
    """The shape of each client, where they are few; otherwise all are dots."""
    everyone = np.unique(np.concatenate([cloud.clients for cloud in plot.clouds])).tolist()
    clients = [client for client in everyone if client != _SERVER]
    shapes = style.SHAPES[:-1] if len(clients) < len(style.SHAPES) else "o" * len(clients)
    return {**({_SERVER: "*"} if _SERVER in everyone else {}), **dict(zip(clients, shapes, strict=False))}


def _names(cloud: Cloud, places: np.ndarray) -> list[Shape]:
    """The class at its mean, the server's where there is one, on the side where neither a name nor a star is."""
    stars = places[cloud.clients == _SERVER]
    taken = [(x - _STAR, y - _STAR, x + _STAR, y + _STAR) for x, y in stars.tolist()]
    found: list[Shape] = []
    for label in np.unique(cloud.classes).tolist():
        where = cloud.classes == label
        server = where & (cloud.clients == _SERVER)
        x, y = places[server if server.any() else where].mean(0).tolist()
        width = width_of(str(label))
        for left, base in ((x + 7, y - 5), (x - 7 - width, y - 5), (x + 7, y + 13), (x - 7 - width, y + 13)):
            box = (left, base - _TALL, left + width, base)
            if not any(_touch(box, other) for other in taken):
                found.append(Text(text=str(label), x=left, y=base, anchor="start"))
                taken.append(box)
                break
    return found


def _touch(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
