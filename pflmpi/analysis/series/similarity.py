"""How similar the clients' personal models are: cosines, layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.model import assembled, client_states, comparable_model
from pflmpi.analysis.plots import Curve, Curves, Matrices, Missing
from pflmpi.analysis.series.pairs import layer_matrices, pairs
from pflmpi.analysis.series.selection import some_of

_TITLE = "Similarity of the clients' layers"
_MOST_CLIENTS = 100
_MOST_IN_MEMORY = 1 << 27  # values of the models of one checkpoint: 512 MiB of float32
_MOST_READ = 1 << 28  # values of the models of all checkpoints
_FEW = 10  # clients
_MANY = 1 << 23  # values that are not worth a copy in float64


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of a layer in some clients' models: ids [m] and rows [m, n]."""

    clients: np.ndarray
    weights: np.ndarray


def figures(checkpoints: Sequence[Checkpoint]) -> list[Matrices | Curves | Missing]:
    """The cosines of every two clients in the last checkpoint, and the mean of all pairs over the rounds.

    Raises:
        CheckpointError: a file is damaged, or does not say how personal models are put together.
    """
    last = {
        name: layer
        for name, layer in layers(checkpoints[-1], _affordable(checkpoints[-1], 1)).items()
        if len(layer.clients) > 1 and (layer.weights != layer.weights[0]).any()
    }
    if not last:
        return [Missing(_TITLE, "all clients predict with the same model, or there is one client alone")]
    return [matrices(checkpoints[-1].number, last), over_rounds(checkpoints, list(last))]


def layers(checkpoint: Checkpoint, most: int) -> dict[str, Layer]:
    """The layers of body and head of the first `most` clients of each cohort; unlike models apart."""
    model = comparable_model(checkpoint)
    found = {}
    for cohort, members in checkpoint.cohorts.items():
        rows: dict[str, list[np.ndarray]] = {}
        for state in client_states(checkpoint, members[:most].tolist()):
            tensors: dict[str, list[np.ndarray]] = {}
            for path, array in sorted(assembled(checkpoint, model, state).items()):
                if not path.startswith("stats/"):
                    tensors.setdefault(path.rpartition("/")[0], []).append(array.ravel())
            for name, arrays in tensors.items():
                rows.setdefault(name, []).append(np.concatenate(arrays))
        prefix = f"{cohort}/" if len(checkpoint.cohorts) > 1 else ""
        found.update({prefix + name: Layer(members[:most], np.stack(weights)) for name, weights in rows.items()})
    return found


def cosines(weights: np.ndarray) -> np.ndarray:
    """The cosines between the rows [m, n], [m, m]."""
    flat = weights.astype(np.float64) if weights.size < _MANY else weights
    gram = flat @ flat.T
    norms = np.sqrt(np.diag(gram))
    return np.asarray(gram / np.maximum(norms[:, np.newaxis] * norms, np.finfo(np.float64).tiny))


def matrices(round: int, there: Mapping[str, Layer]) -> Matrices:
    """The cosines of every two clients for some layers, from the first to the last."""
    return layer_matrices(
        "layer_cosines",
        f"{_TITLE}, round {round}",
        "Cosine between the weights and biases of a layer in two clients' personal models: 1 the same direction, 0 "
        "unrelated. Layers that are the same in all clients are left out.",
        "cosine",
        {name: (layer.clients, cosines(layer.weights)) for name, layer in there.items()},
    )


def over_rounds(checkpoints: Sequence[Checkpoint], names: Sequence[str]) -> Curves:
    """The mean cosine over all pairs of clients, for each of the named layers by round."""
    most = _affordable(checkpoints[-1], len(checkpoints))
    if len(checkpoints) > 3 and most < _FEW:  # of large models rather fewer rounds
        checkpoints = some_of(checkpoints, 3)
        most = _affordable(checkpoints[-1], len(checkpoints))
    means: dict[str, list[float]] = {name: [] for name in names}
    for checkpoint in checkpoints:
        there = layers(checkpoint, most)
        for name, values in means.items():
            values.append(float(pairs(cosines(there[name].weights)).mean()))
    rounds = np.array([one.number for one in checkpoints])
    fewer = any(most < len(members) for members in checkpoints[-1].cohorts.values())
    return Curves(
        name="layer_cosines_over_rounds",
        title=f"{_TITLE} over rounds",
        caption="Mean cosine over all pairs of clients, for each layer of their personal models."
        + (f" Only the first {most} clients." if fewer else ""),
        x_label="round",
        y_label="mean cosine",
        curves=tuple(
            Curve(name, rounds, np.array(values), style=style) for style, (name, values) in enumerate(means.items())
        ),
        by_round=True,
    )


def _affordable(checkpoint: Checkpoint, count: int) -> int:
    """Number of clients whose models are read from each of `count` checkpoints."""
    firsts = sorted(int(members[0]) for members in checkpoint.cohorts.values())
    model = comparable_model(checkpoint)
    sizes = [
        sum(array.size for array in assembled(checkpoint, model, state).values())
        for state in client_states(checkpoint, firsts)
    ]
    values = max(*sizes, 1)
    return max(2, min(_MOST_CLIENTS, _MOST_IN_MEMORY // values, _MOST_READ // (values * count)))
