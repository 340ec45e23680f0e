"""Entries of an array that each client chooses: how many there are, and how far clients and rounds agree."""

from collections.abc import Sequence

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.plots import Curve, Curves, Matrices, Missing, Panel
from pflmpi.analysis.series.pairs import pairs
from pflmpi.analysis.series.values import ClientValues, rows, sentences
from pflmpi.learning.diagnostics import EntryShare

_OVERLAP = "The overlap is Jaccard's: entries in both over entries in either"


def figures(checkpoints: Sequence[Checkpoint], name: str, diagnostic: EntryShare) -> list[Curves | Matrices | Missing]:
    """Share and overlaps over rounds, and the overlap of every two clients in the last checkpoint."""
    last = rows(checkpoints[-1], name, diagnostic)
    if last is None:
        return [Missing(diagnostic.title, f"the checkpoint of round {checkpoints[-1].number} has no values of it")]
    clients, chosen = last
    ids = clients.tolist()
    overlap = Matrices(
        name=f"{name}_overlap",
        title=f"{diagnostic.title}: overlap between clients",
        caption=sentences(
            diagnostic.caption,
            f"The overlap of every two clients after round {checkpoints[-1].number}",
            _OVERLAP,
            "The diagonal is 100 % and not drawn. An empty cell: one of them has not chosen any yet",
        ),
        row_label="client",
        column_label="client",
        value_label="overlap (%)",
        panels=(Panel("", 100 * between_clients(chosen), ids, ids),),
        limits=(0.0, 100.0),
        hide_diagonal=True,
        choices=True,
    )
    return [over_rounds(checkpoints, name, diagnostic), overlap]


def over_rounds(checkpoints: Sequence[Checkpoint], name: str, diagnostic: EntryShare) -> Curves:
    """The share of chosen entries, and the overlaps from checkpoint to checkpoint and between clients."""
    curves: dict[str, list[float]] = {
        "share of the entries that are chosen": [],
        "overlap with the checkpoint before, of clients whose choice changed": [],
        "overlap between two clients": [],
    }
    before: ClientValues | None = None  # one at a time in memory
    for checkpoint in checkpoints:
        found = rows(checkpoint, name, diagnostic)
        chosen = np.zeros((0, 1), bool) if found is None else found[1]
        again = np.empty(0) if before is None or found is None else _of_changed(before, found)
        across = pairs(between_clients(chosen))
        for values, value in zip(curves.values(), (chosen[chosen.any(1)].mean(1), again, across), strict=True):
            values.append(_mean(value))
        before = found
    rounds = np.array([one.number for one in checkpoints])
    return Curves(
        name=f"{name}_over_rounds",
        title=f"{diagnostic.title} over rounds",
        caption=sentences(
            diagnostic.caption,
            "Mean over clients, and over pairs of clients",
            _OVERLAP,
            "A client that has not chosen any yet has no part in the means",
        ),
        x_label="round",
        y_label="share, overlap (%)",
        curves=tuple(Curve(text, rounds, np.array(values), style=i) for i, (text, values) in enumerate(curves.items())),
        by_round=True,
        percent=True,
    )


def jaccard(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """|a and b| / |a or b| along the last axis; NaN where both are empty."""
    both, either = (first & second).sum(-1), (first | second).sum(-1)
    return np.asarray(np.divide(both, either, out=np.full(np.shape(both), np.nan), where=either > 0))


def between_clients(chosen: np.ndarray) -> np.ndarray:
    """The Jaccard overlap of the entries [N, L] of every two clients, [N, N]; NaN where one has none."""
    wide = chosen.astype(np.float32)  # counts below 2**24 are exact
    both = (wide @ wide.T).astype(np.float64)
    counts = np.diag(both)
    either = counts[:, np.newaxis] + counts - both
    known = np.minimum(counts[:, np.newaxis], counts) > 0
    return np.asarray(np.divide(both, either, out=np.full(both.shape, np.nan), where=known))


def _of_changed(before: ClientValues, after: ClientValues) -> np.ndarray:
    """The overlaps of the clients that are in both checkpoints and chose differently."""
    _, then, now = np.intersect1d(before[0], after[0], return_indices=True)
    first, second = before[1][then], after[1][now]
    changed = (first != second).any(1) & first.any(1)
    return jaccard(first[changed], second[changed])


def _mean(values: np.ndarray) -> float:
    return 100 * float(values.mean()) if len(values) else float("nan")
