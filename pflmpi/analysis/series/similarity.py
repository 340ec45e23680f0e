"""How alike the heads and bodies are that clients keep: cosines, layer by layer."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pflmpi.analysis.leaf_rows import LeafRows
from pflmpi.analysis.plots import Curve, Curves, Matrices, Missing, Panel
from pflmpi.analysis.run import Round

_TITLE = "Similarity of the clients' layers"
_PARTS = ("body", "head")
_MOST_CLIENTS = 100
_MOST_VALUES = 1 << 26  # of one leaf in memory: 256 MiB of float32
_MOST_IN_ALL = 1 << 28  # values that the curves read: 1 GiB of float32
_FEW = 10  # clients
_MOST_LAYERS = 6  # matrices in the figure; the curves have all
_SKIPPED = ("received", "before", "critical")  # copies of what others sent or of an earlier model; no weights

Layers = Mapping[str, Sequence[LeafRows]]


def layers(state: Round) -> dict[str, list[LeafRows]]:
    """Return the layers of bodies and heads that clients keep, with their tensors; unlike models apart."""
    found: dict[str, list[LeafRows]] = {}
    for path, rows in state.clients.items():
        steps = path.split("/")
        own = steps[1:] if len(state.cohorts) > 1 else steps
        if own[0] in _SKIPPED or not any(part in own[:-1] for part in _PARTS) or "stats" in own:
            continue
        found.setdefault("/".join(steps[:-1]), []).append(rows)
    return found


def cosines(tensors: Sequence[LeafRows], clients: int) -> np.ndarray:
    """Return the cosines between the first clients' weights of a layer, all tensors of it together, [n, n]."""
    gram = np.zeros((clients, clients))
    for tensor in tensors:
        flat = np.asarray(tensor[:clients]).reshape(clients, -1)
        gram += flat.astype(np.float64) @ flat.astype(np.float64).T if flat.size < _MOST_VALUES // 8 else flat @ flat.T
    norms = np.sqrt(np.diag(gram))
    matrix: np.ndarray = gram / np.maximum(norms[:, np.newaxis] * norms, np.finfo(np.float64).tiny)
    return matrix


def matrices(state: Round) -> Matrices | Missing:
    """Return the cosines of every two clients for some layers of one checkpoint, from the first to the last."""
    there = {name: tensors for name, tensors in layers(state).items() if len(tensors[0]) > 1}
    if not there:
        return _nothing()
    names = list(there)
    if len(names) > _MOST_LAYERS:
        names = [names[i] for i in np.linspace(0, len(names) - 1, _MOST_LAYERS).round().astype(int)]
    panels = []
    for name in names:
        clients = _affordable(there[name])
        ids = there[name][0].clients[:clients].tolist()
        panels.append(Panel(name, cosines(there[name], clients), ids, ids))
    several = f" {len(names)} of {len(there)} layers." if len(names) < len(there) else ""
    return Matrices(
        name="layer_cosines",
        title=f"{_TITLE}, round {state.number}",
        caption="Cosine between the weights and biases of a layer in two clients' personal models: 1 alike, 0 "
        f"unrelated.{several} The diagonal is 1 and not drawn.",
        row_label="client",
        column_label="client",
        value_label="cosine",
        panels=tuple(panels),
        hide_diagonal=True,
    )


def over_rounds(states: Sequence[Round]) -> Curves | Missing:
    """Return the mean cosine over all pairs of clients, for each layer by round."""
    first = {name: tensors for name, tensors in layers(states[-1]).items() if len(tensors[0]) > 1}
    if not first:
        return _nothing()
    whole = sum(math.prod(tensor.shape[1:]) for tensors in first.values() for tensor in tensors)
    if len(states) > 3 and _MOST_IN_ALL // (whole * len(states)) < _FEW:  # of large models rather fewer rounds
        states = [states[0], states[len(states) // 2], states[-1]]
    most = max(2, _MOST_IN_ALL // (whole * len(states)))
    fewer = any(most < len(tensors[0]) for tensors in first.values())
    curves = []
    for style, name in enumerate(first):
        means = []
        for state in states:
            there = layers(state)[name]
            clients = min(most, _affordable(there))
            means.append(_mean_of_pairs(cosines(there, clients)))
        rounds = np.array([state.number for state in states])
        curves.append(Curve(name, rounds, np.array(means), style=style))
    return Curves(
        name="layer_cosines_over_rounds",
        title=f"{_TITLE} over rounds",
        caption="Mean cosine over all pairs of clients, for each layer of their personal models."
        + (f" Only the first {most} clients: the models are large." if fewer else ""),
        x_label="round",
        y_label="mean cosine",
        curves=tuple(curves),
    )


def _mean_of_pairs(matrix: np.ndarray) -> float:
    return float(matrix[np.triu_indices(len(matrix), 1)].mean())


def _affordable(tensors: Sequence[LeafRows]) -> int:
    """Return of how many clients a layer is read."""
    values = max(math.prod(tensor.shape[1:]) for tensor in tensors)
    return max(2, min(len(tensors[0]), _MOST_CLIENTS, _MOST_VALUES // max(values, 1)))


def _nothing() -> Missing:
    return Missing(_TITLE, "clients of this algorithm keep neither bodies nor heads, or there is one client alone")
