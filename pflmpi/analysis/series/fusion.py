"""Whose models go into whose: the weights with which the server mixes models of clients, recomputed from them.

pFedCFR and FedAMP keep no weights, but these follow from the models that the participants of a round uploaded, which
are what their checkpoints hold after it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from pflmpi.analysis.leaf_rows import LeafRows
from pflmpi.analysis.plots import Matrices, Missing, Panel
from pflmpi.analysis.run import Round, Run
from pflmpi.analysis.series.selection import parameter
from pflmpi.analysis.server_leaves import server_shapes

_MODEL = "model/"
_SENT = ("body", "head")  # batch-norm statistics stay with the client
NO_ROUND = "no checkpoint says who took part in its round"


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights [P, P] of the models (columns) in the mix that each participant (row) is sent."""

    round: int
    participants: np.ndarray
    values: np.ndarray


def squared_distances(rows: Iterable[np.ndarray]) -> np.ndarray:
    """Return ||w_i - w_j||^2 over all leaves [P, ...], [P, P] in float64; 0 on the diagonal."""
    gram = _gram(leaf - leaf[:1] for leaf in _flat(rows))  # relative to the first, so that nothing cancels
    norms = np.diag(gram)
    distances: np.ndarray = np.maximum(norms[:, np.newaxis] + norms - 2 * gram, 0.0)
    return distances


def attention(distances: np.ndarray, alpha: float, sigma: float) -> np.ndarray:
    """Return alpha A'(distances) for A(x) = 1 - exp(-x / sigma), with 0 on the diagonal."""
    messages = alpha * np.exp(-distances / sigma) / sigma
    np.fill_diagonal(messages, 0.0)
    return messages


def fedamp_weights(rows: Iterable[np.ndarray], run: Run) -> np.ndarray:
    """Return xi [P, P] of FedAMP (eq. 4), or of HeurFedAMP with `weighting: cosine`, for models with rows [P, ...]."""
    if parameter(run, "weighting", "distance") == "cosine":
        xi = _by_cosine(rows, _number(run, "cosine_scale"), _number(run, "self_weight"))
    else:
        xi = attention(squared_distances(rows), _number(run, "alpha"), _number(run, "sigma"))
        xi = xi / np.maximum(xi.sum(1, keepdims=True), 1.0)
    return _with_self_weight(xi)


def pfedcfr_weights(rows: Iterable[np.ndarray], run: Run) -> np.ndarray:
    """Return zeta [P, P] of pFedCFR with the self weights (eq. 10), for one layer with rows [P, ...]."""
    return _with_self_weight(attention(squared_distances(rows), _number(run, "alpha"), _number(run, "sigma")))


def fedamp(run: Run, states: Sequence[Round]) -> Matrices | Missing:
    """Return the weights of FedAMP's cloud models in some rounds."""
    title = "Weights of the cloud models"
    known = []
    for state in trained(states):
        participants, leaves = _uploads(state)
        known.append(Weights(state.number, participants, fedamp_weights(_read(leaves.values(), participants), run)))
    if not known:
        return Missing(title, NO_ROUND)
    return _drawn(
        "fusion_weights", title, "The weight ξ of a participant's model (column) in another's cloud model", known
    )


def pfedcfr(run: Run, states: Sequence[Round]) -> list[Matrices | Missing]:
    """Return the weights of pFedCFR's fused layers in some rounds: of its first and its last personal layer."""
    title = "Weights of the fused layers"
    by_layer: dict[str, list[Weights]] = {}
    for state in trained(states):
        participants, leaves = _uploads(state)
        for layer, paths in personal_layers(state, parameter(run, "layer_unit", "module") == "tensor").items():
            weights = pfedcfr_weights(_read((leaves[path] for path in paths), participants), run)
            by_layer.setdefault(layer, []).append(Weights(state.number, participants, weights))
    if not by_layer:
        why = "no layer is personal in this run" if list(trained(states)) else NO_ROUND
        return [Missing(title, why)]
    ends = dict.fromkeys((next(iter(by_layer)), list(by_layer)[-1]))
    return [
        _drawn(
            f"fusion_weights_{layer.replace('/', '_')}",
            f"{title}: {layer}",
            f"The weight ζ of a participant's layer {layer} (column) in another's fused layer",
            by_layer[layer],
        )
        for layer in ends
    ]


def personal_layers(state: Round, by_tensor: bool) -> dict[str, list[str]]:
    """Return the layers of pFedCFR that the server fuses for each client, with the paths of their tensors.

    The server's state tells: it has a row per client where a layer is personal, and none where it is common.
    """
    clients = {path.removeprefix(_MODEL): rows.shape for path, rows in state.clients.items()}
    fused = {path.removeprefix("fused/"): shape for path, shape in server_shapes(state).items()}
    personal = [path for path in sorted(fused) if fused[path] == clients[path]]
    if by_tensor:
        return {path: [path] for path in personal}
    return {layer: list(paths) for layer, paths in groupby(personal, lambda path: path.rpartition("/")[0])}


def trained(states: Sequence[Round]) -> list[Round]:
    """Return the checkpoints that say who took part in their round: not the one before the first."""
    return [state for state in states if "participants" in state.metrics]


def _uploads(state: Round) -> tuple[np.ndarray, Mapping[str, LeafRows]]:
    """Return the participants of the round [P], and by path the leaves they sent, of all clients and not read yet."""
    participants = np.sort(state.metrics["participants"])
    sent = {
        path.removeprefix(_MODEL): rows
        for path, rows in state.clients.items()
        if path.removeprefix(_MODEL).split("/")[0] in _SENT
    }
    return participants, sent


def _read(leaves: Iterable[LeafRows], participants: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows [P, ...] of the participants, one leaf at a time in memory."""
    return (rows[participants] for rows in leaves)


def _by_cosine(rows: Iterable[np.ndarray], scale: float, self_weight: float) -> np.ndarray:
    gram = _gram(_flat(rows))
    norms = np.sqrt(np.diag(gram))
    scores = scale * gram / np.maximum(norms[:, np.newaxis] * norms, np.finfo(np.float64).tiny)
    if len(scores) == 1:
        return np.zeros_like(scores)
    np.fill_diagonal(scores, -np.inf)
    shares = np.exp(scores - scores.max(1, keepdims=True))
    mixed: np.ndarray = (1 - self_weight) * shares / shares.sum(1, keepdims=True)
    return mixed


def _with_self_weight(weights: np.ndarray) -> np.ndarray:
    return weights + np.diag(1 - weights.sum(1))


def _gram(flat: Iterable[np.ndarray]) -> np.ndarray:
    return np.asarray(np.stack([rows @ rows.T for rows in flat]).sum(0))


def _flat(rows: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    return (leaf.reshape(len(leaf), -1).astype(np.float64) for leaf in rows)


def _number(run: Run, name: str) -> float:
    return float(run.config["algorithm"][name])


def _drawn(name: str, title: str, what: str, known: Sequence[Weights]) -> Matrices:
    own = np.concatenate([np.diag(weights.values) for weights in known])
    return Matrices(
        name=name,
        title=title,
        caption=f"{what}, recomputed from the models in the checkpoints. The diagonal, a participant's own weight, is "
        f"not drawn; it is between {own.min():.3g} and {own.max():.3g}.",
        row_label="client",
        column_label="model of",
        value_label="weight",
        panels=tuple(
            Panel(f"round {one.round}", one.values, one.participants.tolist(), one.participants.tolist())
            for one in known
        ),
        hide_diagonal=True,
    )
