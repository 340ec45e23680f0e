"""Points on a plane, by class and client."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pflmpi.analysis.drawing import style
from pflmpi.analysis.plots import Cloud, Clouds

_HEIGHT = 3.4  # inches
_SERVER = -1
_SHAPES = "osD^vPX"  # of the clients, where they are few; otherwise all are dots
_ROOM = 16  # pixels from one name to the next
_MOST_TICKS = 20


def clouds(plot: Clouds) -> Figure:
    """Drawing of points side by side: colour and number by class, shape by client, stars for the server."""
    figure = Figure(figsize=(style.WIDTH, _HEIGHT + 0.5), dpi=style.DPI, layout="constrained")
    panels = np.asarray(figure.subplots(1, len(plot.clouds), sharex=True, sharey=True, squeeze=False))[0]
    last = max(int(cloud.classes.max()) for cloud in plot.clouds)
    colours = colormaps["viridis"](np.linspace(0, 1, last + 1))
    everyone = np.unique(np.concatenate([cloud.clients for cloud in plot.clouds])).tolist()
    apart = len(everyone) <= len(_SHAPES) + 1
    marks = {client: _SHAPES[place % len(_SHAPES)] if apart else "o" for place, client in enumerate(everyone)}
    if _SERVER in marks:
        marks[_SERVER] = "*"
    drawn = []
    for axes, cloud in zip(panels, plot.clouds, strict=True):
        for client in np.unique(cloud.clients).tolist():
            chosen = cloud.clients == client
            axes.scatter(
                *cloud.points[chosen].T,
                c=colours[cloud.classes[chosen]],
                marker=marks[client],
                s=90 if client == _SERVER else 16,
                linewidths=0.4,
                edgecolors=style.INK,
            )
        drawn.append((axes, cloud))
        axes.set_title(cloud.title)
        axes.grid(color=style.INK, alpha=0.15, linewidth=0.6)
    figure.supxlabel(plot.x_label, fontsize=10)
    figure.supylabel(plot.y_label, fontsize=10)
    norm = BoundaryNorm(np.arange(last + 2) - 0.5, last + 1)
    scale = ScalarMappable(norm, ListedColormap(colours))
    every = -(-(last + 1) // _MOST_TICKS)
    figure.colorbar(scale, ax=panels.tolist(), label="class", ticks=list(range(0, last + 1, every)))
    named = {client: f"client {client}" for client in everyone} if apart else dict.fromkeys(everyone, "a client")
    names = {("server" if client == _SERVER else named[client]): mark for client, mark in marks.items()}
    figure.legend(
        handles=[
            Line2D([], [], marker=mark, color=style.INK, linestyle="none", label=name) for name, mark in names.items()
        ],
        loc="outside upper right",
        ncols=len(names),
        columnspacing=1.0,
        handletextpad=0.2,
    )
    figure.draw_without_rendering()  # the places of the names depend on those of the points
    for axes, cloud in drawn:
        _name_classes(axes, cloud)
    return figure


def _name_classes(axes: Axes, cloud: Cloud) -> None:
    """Write the class at its mean, the server's where there is one; not where another name is too near."""
    written: list[np.ndarray] = []
    for label in np.unique(cloud.classes).tolist():
        where = cloud.classes == label
        server = where & (cloud.clients == _SERVER)
        place = cloud.points[server if server.any() else where].mean(0)
        pixel = axes.transData.transform(place)
        if all(np.abs(pixel - other).max() > _ROOM for other in written):
            text = axes.annotate(str(label), place, xytext=(5, 4), textcoords="offset points", fontsize=9)
            text.set_in_layout(False)
            written.append(pixel)
