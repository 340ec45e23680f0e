"""Class means, or class embeddings, on a plane: which classes lie together, and whether the clients agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from pflmpi.analysis.plots import Cloud, Clouds, Missing
from pflmpi.analysis.run import Round
from pflmpi.analysis.series.selection import client_leaf
from pflmpi.analysis.server_leaves import server_leaf

_SERVER = -1
_MOST_POINTS = 2000  # of t-SNE, whose time grows faster than their number
_PERPLEXITY = 30.0


@dataclass(frozen=True, eq=False)
class Vectors:
    """Vectors [M, d] of classes in one checkpoint, with the classes [M] and clients [M]; client -1 is the server."""

    round: int
    values: np.ndarray
    classes: np.ndarray
    clients: np.ndarray


def class_means(state: Round) -> Vectors | None:
    """Return the class means that server and clients keep and that are known; None where none is kept."""
    groups = []
    everyone, there = server_leaf(state, "means"), server_leaf(state, "known")
    if everyone is not None and there is not None:
        groups.append((np.array([_SERVER]), everyone[np.newaxis], there[np.newaxis]))
    means, known = client_leaf(state, "own/means"), client_leaf(state, "own/known")
    if means is not None and known is not None:
        groups.append((*means, known[1]))
    if not groups:
        return None
    found = []
    for clients, values, has in groups:
        place, label = np.nonzero(has)
        found.append((values[place, label].astype(np.float64), label, clients[place]))
    parts = [np.concatenate(column) for column in zip(*found, strict=True)]
    return Vectors(state.number, *parts)


def class_embeddings(state: Round) -> Vectors | None:
    """Return the class embeddings of GPFL, which the server keeps for all classes; None where none is kept."""
    values = server_leaf(state, "shared/embeddings/weight")
    if values is None:
        return None
    classes = np.arange(len(values))
    return Vectors(state.number, values.astype(np.float64), classes, np.full_like(classes, _SERVER))


def pca(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first two principal components [M, 2] of values [M, d], and their shares of the variance [2].

    Each component's largest loading is positive, so that the picture does not depend on the linear algebra library.
    """
    centred = values - values.mean(0)
    _, singular, axes = np.linalg.svd(centred, full_matrices=False)
    axes = axes[:2] * np.sign(axes[np.arange(len(axes[:2])), np.abs(axes[:2]).argmax(1)])[:, np.newaxis]
    points = np.zeros((len(values), 2))
    points[:, : len(axes)] = centred @ axes.T
    shares = np.zeros(2)
    shares[: len(axes)] = singular[: len(axes)] ** 2 / max(float((singular**2).sum()), np.finfo(np.float64).tiny)
    return points, shares


def tsne(values: np.ndarray) -> np.ndarray:
    """Return t-SNE of values [M, d] in two dimensions, [M, 2], from a fixed start."""
    method: Any = import_module("sklearn.manifold").TSNE  # a second, and only where a run keeps class means
    perplexity = min(_PERPLEXITY, (len(values) - 1) / 3)
    found = method(perplexity=perplexity, init="pca", random_state=0).fit_transform(values.astype(np.float32))
    return np.asarray(found, np.float64)


def projections(states: Sequence[Round]) -> list[Clouds | Missing]:
    """Return the class means, or embeddings, of some checkpoints by PCA and by t-SNE, each fitted to all of them."""
    for what, find in (("means", class_means), ("embeddings", class_embeddings)):
        kept = [found for state in states if (found := find(state)) is not None]
        if kept:
            return _projected(what, [found for found in kept if len(found.classes)])
    return [Missing("Class means", "neither the server nor the clients of this algorithm keep class means")]


def _projected(what: str, kept: Sequence[Vectors]) -> list[Clouds | Missing]:
    title = f"Class {what}"
    values = np.concatenate([found.values for found in kept]) if kept else np.empty((0, 0))
    if len(values) < 4 or not np.isfinite(values).all():
        why = f"only {len(values)} class {what} are known in the checkpoints, or some are not finite"
        return [Missing(title, why)]
    points, shares = pca(values)
    percent = [f"principal component {i} ({100 * share:.0f} % of the variance)" for i, share in enumerate(shares, 1)]
    others = ", other marks those of clients" if any((found.clients != _SERVER).any() for found in kept) else ""
    whose = f"Each class has a colour, and its number where there is room; stars are the server's class {what}{others}."
    plots: list[Clouds | Missing] = [
        _clouds(f"class_{what}_pca", f"{title}, PCA", f"{whose} One projection for all rounds.", percent, kept, points)
    ]
    if len(values) > _MOST_POINTS:
        return [*plots, Missing(f"{title}, t-SNE", f"more than {_MOST_POINTS} points take too long: {len(values)}")]
    caption = f"{whose} t-SNE keeps neighbours together; its axes and distances have no unit."
    axes = ["t-SNE 1", "t-SNE 2"]
    return [*plots, _clouds(f"class_{what}_tsne", f"{title}, t-SNE", caption, axes, kept, tsne(values))]


def _clouds(
    name: str, title: str, caption: str, axes: Sequence[str], kept: Sequence[Vectors], points: np.ndarray
) -> Clouds:
    ends = np.cumsum([len(found.classes) for found in kept])[:-1]
    return Clouds(
        name=name,
        title=title,
        caption=caption,
        x_label=axes[0],
        y_label=axes[1],
        clouds=tuple(
            Cloud(f"round {found.round}", part, found.classes, found.clients)
            for found, part in zip(kept, np.split(points, ends), strict=True)
        ),
    )
