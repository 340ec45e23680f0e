"""How similar the clients' personal models are, layer by layer: cosines of weights, CKA of outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.model import assembled, client_states, comparable_model
from pflmpi.analysis.plots import Curve, Curves, Matrices, Missing, Panel
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import some_of, spread_over
from pflmpi.store import probe_file
from pflmpi.store.probe_file import Probe

_MOST_LAYERS = 6  # matrices in a figure


def layer_matrices(
    name: str, title: str, caption: str, value_label: str, layers: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Matrices:
    """Matrices of some layers, from the first to the last, without their diagonals of 1.

    Args:
        layers: by name the ids [m] of clients and the matrix [m, m].
    """
    names = list(layers)
    chosen = [names[place] for place in spread_over(range(len(names)), _MOST_LAYERS)]
    several = f" {len(chosen)} of {len(names)} layers." if len(chosen) < len(names) else ""
    panels = []
    for layer in chosen:
        clients, values = layers[layer]
        panels.append(Panel(layer, values, clients.tolist(), clients.tolist()))
    return Matrices(
        name=name,
        title=title,
        caption=f"{caption}{several} The diagonal is 1 and not drawn. Colours go from 0, or below, to 1.",
        row_label="client",
        column_label="client",
        value_label=value_label,
        panels=tuple(panels),
        limits=(0.0, 1.0),
        hide_diagonal=True,
    )


def pairs(matrix: np.ndarray) -> np.ndarray:
    """The known values [n] of a symmetric matrix above its diagonal."""
    above = matrix[np.triu_indices(len(matrix), 1)]
    return np.asarray(above[~np.isnan(above)])


_COSINE_TITLE = "Similarity of the clients' layers"
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


def cosine_figures(checkpoints: Sequence[Checkpoint]) -> list[Matrices | Curves | Missing]:
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
        return [Missing(_COSINE_TITLE, "all clients predict with the same model, or there is one client alone")]
    return [cosine_matrices(checkpoints[-1].number, last), cosines_over_rounds(checkpoints, list(last))]


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


def cosine_matrices(round: int, there: Mapping[str, Layer]) -> Matrices:
    """The cosines of every two clients for some layers, from the first to the last."""
    return layer_matrices(
        "layer_cosines",
        f"{_COSINE_TITLE}, round {round}",
        "Cosine between the weights and biases of a layer in two clients' personal models: 1 the same direction, 0 "
        "unrelated. Layers that are the same in all clients are left out.",
        "cosine",
        {name: (layer.clients, cosines(layer.weights)) for name, layer in there.items()},
    )


def cosines_over_rounds(checkpoints: Sequence[Checkpoint], names: Sequence[str]) -> Curves:
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
        title=f"{_COSINE_TITLE} over rounds",
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


_CKA_TITLE = "CKA of the clients' layers"
_MOST_ROUNDS = 6  # curves


def cka_figures(run: Run) -> list[Matrices | Curves | Missing]:
    """CKA of every two clients for some layers of the last probe, and the mean for all layers and probes.

    Raises:
        CheckpointError: a probe is damaged, or of a newer format.
    """
    there = probe_file.rounds(run.path)
    if not there:
        return [Missing(_CKA_TITLE, f"`pflmpi probe {run.path}`, where torch and the data are, has not been run")]
    found = [probe_file.read(run.path, number) for number in spread_over(there, _MOST_ROUNDS)]
    return [cka_matrices(found[-1]), through_layers(found)]


def cka_matrices(probe: Probe) -> Matrices:
    """CKA of every two clients for some layers, from the first to the last."""
    return layer_matrices(
        "layer_cka",
        f"{_CKA_TITLE}, round {probe.round}",
        "Linear CKA (unbiased) between the outputs of a layer of two clients' models for the same "
        f"{probe.samples} test samples: 1 similar, about 0 unrelated.",
        "CKA",
        {name: (layer.clients, layer.cka) for name, layer in probe.layers.items()},
    )


def through_layers(probes: Sequence[Probe]) -> Curves:
    """Mean CKA over pairs of clients from the first layer to the last, with a band for the last probe."""
    names = tuple(dict.fromkeys(name for probe in probes for name in probe.layers))
    x = np.arange(1, len(names) + 1)
    curves = []
    for style, probe in enumerate(probes):
        known = [pairs(probe.layers[name].cka) if name in probe.layers else np.empty(0) for name in names]
        low, mean, high = np.array([_middle_and_mean(values) for values in known]).T
        curve = Curve(f"round {probe.round}", x, mean, points=np.array(names), style=style)
        curves.append(replace(curve, low=low, high=high) if probe is probes[-1] else curve)
    return Curves(
        name="layer_cka_through_layers",
        title=f"{_CKA_TITLE}, from the first to the last",
        caption=f"Mean over all pairs of clients; nine in ten pairs of round {probes[-1].round} are in the band.",
        x_label="layer",
        y_label="mean CKA",
        curves=tuple(curves),
        x_names=names,
    )


def _middle_and_mean(values: np.ndarray) -> tuple[float, float, float]:
    """The 5th percentile, the mean and the 95th percentile; NaN without values."""
    if not len(values):
        return np.nan, np.nan, np.nan
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(values.mean()), float(high)
