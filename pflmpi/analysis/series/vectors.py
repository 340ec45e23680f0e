"""Vectors of classes on a plane: which classes are close, and whether the clients agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.plots import Cloud, Clouds, Missing
from pflmpi.analysis.series.values import kept_array, sentences
from pflmpi.learning.diagnostics import ClassVectors

_SERVER = -1
_MOST_POINTS = 2000  # of t-SNE, whose time grows faster than their number
_FEWEST_POINTS = 100  # of t-SNE: what it shows of fewer is mostly chance
_PERPLEXITY = 30.0


@dataclass(frozen=True, eq=False)
class Vectors:
    """Vectors [M, d] of classes in one checkpoint, with the classes [M] and clients [M]; client -1 is the server."""

    round: int
    values: np.ndarray
    classes: np.ndarray
    clients: np.ndarray


def projections(checkpoints: Sequence[Checkpoint], name: str, diagnostic: ClassVectors) -> list[Clouds | Missing]:
    """The vectors of some checkpoints by PCA and by t-SNE, each fitted to all of them."""
    title = diagnostic.title
    kept = [found for one in checkpoints if len((found := known_vectors(one, diagnostic)).classes)]
    values = np.concatenate([found.values for found in kept]) if kept else np.empty((0, 0))
    if len(values) < 4 or not np.isfinite(values).all() or (values == values[0]).all():
        why = f"only {len(values)} vectors are known in the checkpoints, or all are the same, or some are not finite"
        return [Missing(title, why)]
    of_clients = any((found.clients != _SERVER).any() for found in kept)
    marks = "Each class has a colour, and its number where there is room; stars are the server's" + (
        ", other marks those of clients" if of_clients else ""
    )
    points, shares = pca(values)
    percent = [f"principal component {i} ({100 * share:.0f} % of the variance)" for i, share in enumerate(shares, 1)]
    caption = sentences(diagnostic.caption, marks, "One projection for all rounds")
    plots: list[Clouds | Missing] = [_clouds(f"{name}_pca", f"{title}, PCA", caption, percent, kept, points)]
    if len(values) < _FEWEST_POINTS:
        return plots
    if len(values) > _MOST_POINTS:
        return [*plots, Missing(f"{title}, t-SNE", f"more than {_MOST_POINTS} points take too long: {len(values)}")]
    caption = sentences(diagnostic.caption, marks, "t-SNE keeps neighbours together; its axes have no unit")
    axes = ["t-SNE 1", "t-SNE 2"]
    return [*plots, _clouds(f"{name}_tsne", f"{title}, t-SNE", caption, axes, kept, tsne(values))]


def known_vectors(checkpoint: Checkpoint, diagnostic: ClassVectors) -> Vectors:
    """The vectors that server and clients keep and that are known."""
    parts = []
    if diagnostic.server and (everyone := checkpoint.server_leaf(diagnostic.server)) is not None:
        known = checkpoint.server_leaf(diagnostic.server_known) if diagnostic.server_known else None
        parts.append((np.array([_SERVER]), everyone[np.newaxis], None if known is None else known[np.newaxis]))
    if diagnostic.kept and (kept := kept_array(checkpoint, diagnostic.kept)) is not None:
        flags = kept_array(checkpoint, diagnostic.kept_known) if diagnostic.kept_known else None
        parts.append((*kept, None if flags is None else flags[1]))
    found = []
    for clients, values, known in parts:
        place, label = np.nonzero(np.ones(values.shape[:2], bool) if known is None else known)
        found.append((values[place, label].astype(np.float64), label, clients[place]))
    if not found:
        return Vectors(checkpoint.number, np.empty((0, 0)), np.empty(0, int), np.empty(0, int))
    return Vectors(checkpoint.number, *(np.concatenate(column) for column in zip(*found, strict=True)))


def pca(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first two principal components [M, 2] of values [M, d], and their shares of the variance [2].

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
    """t-SNE of values [M, d] in two dimensions, [M, 2], from a fixed start."""
    method: Any = import_module("sklearn.manifold").TSNE  # takes a second, and few runs have class vectors
    perplexity = min(_PERPLEXITY, (len(values) - 1) / 3)
    found = method(perplexity=perplexity, init="pca", random_state=0).fit_transform(values.astype(np.float32))
    return np.asarray(found, np.float64)


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
