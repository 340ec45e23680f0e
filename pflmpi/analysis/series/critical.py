"""The critical entries psi of FedGMH: how many there are, and how far they agree."""

from collections.abc import Sequence

import numpy as np

from pflmpi.analysis.plots import Curve, Curves, Matrices, Missing, Panel
from pflmpi.analysis.run import Round
from pflmpi.analysis.series.selection import client_leaf


def entries(state: Round) -> np.ndarray | None:
    """Return psi of each client, [N, L] bool over the entries of a head, weight before bias; None if none is kept."""
    parts = [client_leaf(state, f"critical/{name}") for name in ("weight", "bias")]
    if parts[0] is None or parts[1] is None:
        return None
    return np.concatenate([rows.reshape(len(rows), -1) for _, rows in (parts[0], parts[1])], axis=1)


def jaccard(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return |a and b| / |a or b| along the last axis; NaN where both are empty."""
    both, either = (first & second).sum(-1), (first | second).sum(-1)
    return np.asarray(np.divide(both, either, out=np.full(np.shape(both), np.nan), where=either > 0))


def between_clients(psi: np.ndarray) -> np.ndarray:
    """Return the Jaccard overlap of psi [N, L] of every two clients, [N, N]; NaN where one has no entries."""
    wide = psi.astype(np.float32)  # counts below 2**24 are exact
    both = (wide @ wide.T).astype(np.float64)
    counts = np.diag(both)
    either = counts[:, np.newaxis] + counts - both
    known = np.minimum(counts[:, np.newaxis], counts) > 0
    return np.asarray(np.divide(both, either, out=np.full(both.shape, np.nan), where=known))


def over_rounds(states: Sequence[Round]) -> Curves | Missing:
    """Return the share of critical entries, and the overlaps from checkpoint to checkpoint and between clients."""
    title = "Critical entries ψ over rounds"
    kinds: dict[str, list[float]] = {
        "share of the head that is critical": [],
        "overlap with the checkpoint before, of clients whose ψ changed": [],
        "overlap between two clients": [],
    }
    previous = None  # one at a time in memory
    for state in states:
        psi = entries(state)
        if psi is None:
            return Missing(title, "this variant of FedGMH averages heads and keeps no ψ")
        before = np.empty(0) if previous is None else jaccard(previous, psi)[_changed(previous, psi)]
        found = (psi.mean(1)[psi.any(1)], before, _pairs(between_clients(psi)))
        for values, overlap in zip(kinds.values(), found, strict=True):
            values.append(_mean(overlap))
        previous = psi
    rounds = np.array([state.number for state in states])
    return Curves(
        name="critical_over_rounds",
        title=title,
        caption="Mean over clients, and over pairs of clients. The overlap is Jaccard's: entries in both over entries "
        "in either. A client that has not trained has no critical entries, and no part in the overlaps.",
        x_label="round",
        y_label="share, overlap (%)",
        curves=tuple(
            Curve(name, rounds, np.array(values, np.float64), style=i) for i, (name, values) in enumerate(kinds.items())
        ),
    )


def matrix(state: Round) -> Matrices | Missing:
    """Return the overlap of the critical entries of every two clients in one checkpoint."""
    title = "Overlap of ψ between clients"
    psi = entries(state)
    if psi is None:
        return Missing(title, "this variant of FedGMH averages heads and keeps no ψ")
    return Matrices(
        name="critical_overlap",
        title=title,
        caption=f"Jaccard overlap of the critical entries of every two clients after round {state.number}; the "
        "diagonal is 100 %. An empty cell: one of them has not trained yet.",
        row_label="client",
        column_label="client",
        value_label="overlap (%)",
        panels=(Panel("", 100 * between_clients(psi), range(len(psi)), range(len(psi))),),
        hide_diagonal=True,
    )


def _changed(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    different: np.ndarray = (before != after).any(1) & before.any(1)
    return different


def _pairs(overlap: np.ndarray) -> np.ndarray:
    above: np.ndarray = overlap[np.triu_indices(len(overlap), 1)]
    return above


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return 100 * float(known.mean()) if len(known) else float("nan")
