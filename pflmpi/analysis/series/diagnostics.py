"""Figures of the diagnostics that an algorithm declares, by kind."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.clients_table import (
    ClientValues,
    read_client_numbers,
    read_diagnostic,
    read_kept_array,
    read_kept_rows,
)
from pflmpi.analysis.plots import Cloud, Clouds, Curve, Curves, Matrices, Missing, Panel, Plot
from pflmpi.analysis.selection import MOST_CLIENTS, choose_clients, describe_chosen_clients, pick_first_middle_last
from pflmpi.analysis.series.similarity import select_pairs
from pflmpi.learning.diagnostics import Category, ClassVectors, ClientWeights, Diagnostic, EntryShare, PerClient


def plot_diagnostics(checkpoints: Sequence[Checkpoint]) -> list[Plot | Missing]:
    """The figures of every diagnostic that the newest checkpoint describes, named `diagnostic-NAME...`.

    These names are unique, as neither other figures nor diagnostics have a hyphen in their names.

    Args:
        checkpoints: checkpoints of one run, ascending, at least one.

    Raises:
        CheckpointError: a file is damaged.
    """
    plots: list[Plot | Missing] = []
    for name, diagnostic in checkpoints[-1].diagnostics.items():
        match diagnostic:
            case PerClient() | Category():
                plots.append(_plot_client_numbers(checkpoints, name, diagnostic))
            case EntryShare():
                plots += _plot_shares(checkpoints, name, diagnostic)
            case ClientWeights():
                plots.append(_plot_weights(pick_first_middle_last(checkpoints), name, diagnostic))
            case ClassVectors():
                plots += plot_projections(pick_first_middle_last(checkpoints), name, diagnostic)
    return [plot if isinstance(plot, Missing) else replace(plot, name=f"diagnostic-{plot.name}") for plot in plots]


def _format_axis_label(name: str, diagnostic: Diagnostic) -> str:
    words = name.replace("_", " ")
    return f"{words} ({diagnostic.unit})" if diagnostic.unit else words


def _join_sentences(*texts: str) -> str:
    """Joins texts as sentences; empty ones are left out.

    >>> _join_sentences("One", "", "Two.")
    'One. Two.'
    """
    return " ".join(text if text.endswith(".") else f"{text}." for text in texts if text)


# --- one number per client


def _plot_client_numbers(
    checkpoints: Sequence[Checkpoint], name: str, diagnostic: PerClient | Category
) -> Matrices | Missing:
    """A number for each client (rows) and checkpoint (columns)."""
    values = np.full((checkpoints[-1].num_clients, len(checkpoints)), np.nan)
    for column, checkpoint in enumerate(checkpoints):
        values[:, column] = read_client_numbers(checkpoint, name, diagnostic)
    if np.isnan(values).all():
        return Missing(diagnostic.title, "no checkpoint has a value of it yet")
    rounds = [checkpoint.number for checkpoint in checkpoints]
    return Matrices(
        name=name,
        title=diagnostic.title,
        caption=_join_sentences(diagnostic.caption, "An empty cell: not known" if np.isnan(values).any() else ""),
        row_label="client",
        column_label="round",
        value_label=_format_axis_label(name, diagnostic),
        panels=(Panel("", values, range(len(values)), rounds),),
        limits=diagnostic.limits if isinstance(diagnostic, PerClient) else None,
        categories=tuple(map(str, range(diagnostic.count))) if isinstance(diagnostic, Category) else (),
    )


# --- shares of entries


def _plot_shares(
    checkpoints: Sequence[Checkpoint], name: str, diagnostic: EntryShare
) -> list[Curves | Matrices | Missing]:
    """Share and overlaps over rounds, and the overlap of every two clients in the last checkpoint."""
    last, title = checkpoints[-1], diagnostic.title
    among = choose_clients(last)
    choices = read_diagnostic(last, name, diagnostic, among)
    if choices is None:
        return [Missing(title, f"the checkpoint of round {last.number} has no values of it")]
    ids = choices[0].tolist()
    overlap = Matrices(
        name=f"{name}-overlap",
        title=f"{title}: overlap between clients",
        caption=_join_sentences(
            diagnostic.caption,
            f"Entries in both over entries in either (Jaccard), of every two clients after round {last.number}",
            "The diagonal is not drawn. An empty cell: one of them has not chosen any yet",
            describe_chosen_clients(last, among),
        ),
        row_label="client",
        column_label="client",
        value_label="overlap (%)",
        panels=(Panel("", 100 * compute_overlaps(choices[1]), ids, ids),),
        limits=(0.0, 100.0),
        hide_diagonal=True,
        choices=True,
    )
    return [_plot_shares_over_rounds(checkpoints, name, diagnostic, among), overlap]


def _plot_shares_over_rounds(
    checkpoints: Sequence[Checkpoint], name: str, diagnostic: EntryShare, among: np.ndarray
) -> Curves:
    """The share of chosen entries, and the overlaps from checkpoint to checkpoint and between clients."""
    curves: dict[str, list[float]] = {
        "share of the entries": [],
        "overlap with the checkpoint before": [],
        "overlap between two clients": [],
    }
    before: ClientValues | None = None  # only two checkpoints are in memory
    for checkpoint in checkpoints:
        now = read_diagnostic(checkpoint, name, diagnostic, among)
        chosen = np.zeros((0, 1), bool) if now is None else now[1]
        shares = chosen[chosen.any(1)].mean(1)
        with_before = np.empty(0) if before is None or now is None else _compute_overlaps_of_changed(before, now)
        between_clients = select_pairs(compute_overlaps(chosen))
        for means, values in zip(curves.values(), (shares, with_before, between_clients), strict=True):
            means.append(100 * float(values.mean()) if len(values) else float("nan"))
        before = now
    rounds = np.array([checkpoint.number for checkpoint in checkpoints])
    return Curves(
        name=f"{name}-over_rounds",
        title=f"{diagnostic.title} over rounds",
        caption=_join_sentences(
            diagnostic.caption,
            "Means over clients, and pairs of clients, that have chosen any",
            describe_chosen_clients(checkpoints[-1], among),
        ),
        y_label="share, overlap (%)",
        curves=tuple(Curve(label, rounds, np.array(y), style=i) for i, (label, y) in enumerate(curves.items())),
        percent=True,
    )


def compute_jaccard(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The Jaccard index |a and b| / |a or b| along the last axis; NaN where both are empty."""
    both, either = (first & second).sum(-1), (first | second).sum(-1)
    return np.asarray(np.divide(both, either, out=np.full(np.shape(both), np.nan), where=either > 0))


def compute_overlaps(chosen: np.ndarray) -> np.ndarray:
    """The Jaccard index of the chosen entries [N, L] of every two clients, [N, N]; NaN if one chose none."""
    ones = chosen.astype(np.float32)  # counts below 2**24 are exact
    both = (ones @ ones.T).astype(np.float64)
    counts = np.diag(both)
    either = counts[:, np.newaxis] + counts - both
    both_chose = np.minimum(counts[:, np.newaxis], counts) > 0
    return np.asarray(np.divide(both, either, out=np.full(both.shape, np.nan), where=both_chose))


def _compute_overlaps_of_changed(before: ClientValues, after: ClientValues) -> np.ndarray:
    """The Jaccard index of each client between two checkpoints, for clients in both whose choice changed."""
    _, then, now = np.intersect1d(before[0], after[0], return_indices=True)
    first, second = before[1][then], after[1][now]
    changed = (first != second).any(1) & first.any(1)
    return compute_jaccard(first[changed], second[changed])


# --- weights of clients

_ROUNDING = 1e-5  # relative rounding error of float32 sums


def _plot_weights(checkpoints: Sequence[Checkpoint], name: str, diagnostic: ClientWeights) -> Matrices | Missing:
    """The weights that clients (rows) give to clients (columns) in some checkpoints."""
    panel_or_none = [_make_weight_panel(checkpoint, name, diagnostic) for checkpoint in checkpoints]
    panels = tuple(panel for panel in panel_or_none if panel is not None)
    if not panels:
        return Missing(diagnostic.title, "no checkpoint says who took part in its round, or none has these weights")
    hidden = diagnostic.limits is None  # otherwise a client's own weight would dominate the colour scale
    if (equal := find_only_value(panels, hidden)) is not None:
        return Missing(diagnostic.title, f"all equal: {equal:.4g} in {', '.join(panel.title for panel in panels)}")
    own = np.concatenate([np.diagonal(panel.values) for panel in panels])
    diagonal = f"The diagonal, a client's own weight, is not drawn; it is between {own.min():.3g} and {own.max():.3g}"
    return Matrices(
        name=name,
        title=diagnostic.title,
        caption=_join_sentences(
            diagnostic.caption,
            "An empty cell: no weight is given" if any(np.isnan(panel.values).any() for panel in panels) else "",
            diagonal if hidden and own.any() else "",
            describe_chosen_clients(checkpoints[-1], choose_clients(checkpoints[-1])) if diagnostic.server else "",
        ),
        row_label="client",
        column_label="weight of client",
        value_label=_format_axis_label(name, diagnostic),
        panels=panels,
        limits=diagnostic.limits,
        hide_diagonal=hidden,
    )


def find_only_value(panels: Sequence[Panel], hide_diagonal: bool) -> float | None:
    """The value that all weights have, up to rounding; None if they differ."""
    weights = np.concatenate([panel.drawn_values(hide_diagonal).ravel() for panel in panels])
    weights = weights[~np.isnan(weights)]
    if len(weights) < 2 or weights.max() - weights.min() > _ROUNDING * np.abs(weights).max():
        return None
    return float(weights.mean())


def _make_weight_panel(checkpoint: Checkpoint, name: str, diagnostic: ClientWeights) -> Panel | None:
    """The weights of one checkpoint; None if it has none.

    Weights that clients keep are drawn for the participants of the round only, as those of other clients are older. Of
    a matrix of all clients that the server keeps, some rows and columns are drawn.
    """
    among = None
    if diagnostic.server:
        among = choose_clients(checkpoint)
    elif diagnostic.kept:
        among = checkpoint.participants
    values = read_diagnostic(checkpoint, name, diagnostic, among)
    if values is None or (diagnostic.kept and among is None):
        return None
    clients, weights = values
    columns = clients
    if diagnostic.server:
        weights = weights[:, clients]
    if diagnostic.kept:
        others = read_kept_rows(checkpoint, diagnostic.clients, among) if diagnostic.clients else None
        if others is None:
            columns = np.concatenate([clients, np.setdiff1d(np.arange(weights.shape[1]), clients)])
            weights = weights[:, columns]
        else:
            columns, weights = _scatter_weights(clients, others[1], weights)
    return Panel(f"round {checkpoint.number}", weights.astype(np.float64), clients.tolist(), columns.tolist())


def _scatter_weights(clients: np.ndarray, others: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Arranges weights, given with the ids they belong to, as a matrix with a column for each id.

    Args:
        clients: [m] ids of the rows.
        others: [m, M] ids that the weights belong to, negative for none.
        weights: [m, M], or [m, 1 + M] with the client's own weight first.

    Returns:
        The ids of the columns, first those of the rows, and the matrix, NaN where there is no weight.
    """
    if weights.shape[1] == others.shape[1] + 1:
        others = np.column_stack([clients, others])
    columns = np.concatenate([clients, np.setdiff1d(others[others >= 0], clients)])
    matrix = np.full((len(clients), len(columns)), np.nan)
    rows, entries = np.nonzero(others >= 0)
    column_of = {client: column for column, client in enumerate(columns.tolist())}
    matrix[rows, [column_of[client] for client in others[rows, entries].tolist()]] = weights[rows, entries]
    return columns, matrix


# --- vectors of classes

_SERVER = -1
_MOST_POINTS = 2000  # for t-SNE, whose time grows faster than linearly
_FEWEST_POINTS = 100  # for t-SNE, which is mostly chance with fewer
_PERPLEXITY = 30.0


def plot_projections(checkpoints: Sequence[Checkpoint], name: str, diagnostic: ClassVectors) -> list[Clouds | Missing]:
    """The class vectors of some checkpoints, projected by PCA and by t-SNE; each is fitted to all checkpoints."""
    title = diagnostic.title
    clouds = [cloud for checkpoint in checkpoints if len((cloud := read_known_vectors(checkpoint, diagnostic)).classes)]
    vectors = np.concatenate([cloud.points for cloud in clouds]) if clouds else np.empty((0, 0))
    if len(vectors) < 4 or not np.isfinite(vectors).all() or (vectors == vectors[0]).all():
        why = f"only {len(vectors)} vectors are known in the checkpoints, or all are the same, or some are not finite"
        return [Missing(title, why)]
    of_clients = any((cloud.clients != _SERVER).any() for cloud in clouds)
    marks = "Colours: classes; stars: the server's" + (
        f", other marks those of up to {MOST_CLIENTS} clients" if of_clients else ""
    )
    caption = _join_sentences(diagnostic.caption, marks, "One projection for all rounds")

    def drawn(method: str, points: np.ndarray, axes: Sequence[str]) -> Clouds:
        """The figure of the projected points [M, 2]."""
        parts = np.split(points, np.cumsum([len(cloud.classes) for cloud in clouds])[:-1])
        return Clouds(
            name=f"{name}-{method.lower().replace('-', '')}",
            title=f"{title}, {method}",
            caption=caption,
            x_label=axes[0],
            y_label=axes[1],
            clouds=tuple(replace(cloud, points=part) for cloud, part in zip(clouds, parts, strict=True)),
            class_names=tuple(checkpoints[-1].class_names),
        )

    points, shares = pca(vectors)
    axes = [f"component {i} ({100 * share:.0f} % of variance)" for i, share in enumerate(shares, 1)]
    plots: list[Clouds | Missing] = [drawn("PCA", points, axes)]
    if len(vectors) > _MOST_POINTS:
        plots.append(Missing(f"{title}, t-SNE", f"more than {_MOST_POINTS} points take too long: {len(vectors)}"))
    elif len(vectors) >= _FEWEST_POINTS:
        plots.append(drawn("t-SNE", tsne(vectors), ["t-SNE 1", "t-SNE 2"]))
    return plots


def read_known_vectors(checkpoint: Checkpoint, diagnostic: ClassVectors) -> Cloud:
    """The known class vectors [M, d] that the server and some clients keep."""
    parts, among = [], choose_clients(checkpoint)
    if diagnostic.server and (shared := checkpoint.server_leaf(diagnostic.server)) is not None:
        flag = checkpoint.server_leaf(diagnostic.server_known) if diagnostic.server_known else None
        parts.append((np.array([_SERVER]), shared[np.newaxis], None if flag is None else flag[np.newaxis]))
    if diagnostic.kept and (kept := read_kept_array(checkpoint, diagnostic.kept, among)) is not None:
        flags = read_kept_array(checkpoint, diagnostic.kept_known, among) if diagnostic.kept_known else None
        parts.append((*kept, None if flags is None else flags[1]))
    vectors = []  # points, classes and clients of each part
    for clients, values, flag in parts:
        row, label = np.nonzero(np.ones(values.shape[:2], bool) if flag is None else flag)
        vectors.append((values[row, label].astype(np.float64), label, clients[row]))
    title = f"round {checkpoint.number}"
    if not vectors:
        return Cloud(title, np.empty((0, 0)), np.empty(0, int), np.empty(0, int))
    return Cloud(title, *(np.concatenate(arrays) for arrays in zip(*vectors, strict=True)))


def pca(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Projects values [M, d] on their first two principal components [M, 2]; also their shares of the variance [2].

    The largest loading of each component is positive, so that signs do not depend on the linear algebra library.
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
    """t-SNE of values [M, d] in two dimensions, [M, 2], with a fixed seed."""
    method: Any = import_module("sklearn.manifold").TSNE  # slow to import, and few runs have class vectors
    perplexity = min(_PERPLEXITY, (len(values) - 1) / 3)
    points = method(perplexity=perplexity, init="pca", random_state=0).fit_transform(values.astype(np.float32))
    return np.asarray(points, np.float64)
