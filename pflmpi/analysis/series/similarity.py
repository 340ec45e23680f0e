"""Figures of how similar the clients' personal models are, by layer: cosines of weights, CKA of outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.model import assemble_model, get_comparable_model, read_client_states
from pflmpi.analysis.plots import Curve, Curves, Matrices, Missing, Panel
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import MOST_CLIENTS, choose_clients, describe_chosen_clients, pick_evenly_spaced
from pflmpi.store import probe_file

_COSINE_TITLE = "Similarity of the clients' layers"
_CKA_TITLE = "CKA of the clients' layers"
NOT_PROBED = "`pflmpi probe RUN`, where torch and the data are, has not been run"
_SAME = "all clients predict with the same model, or there is one client alone"
_ROUNDING = 1e-6  # of a similarity of 1, in float32
_MOST_LAYERS = 6  # matrices in a figure
_MOST_PROBES = 6  # curves
_MOST_IN_MEMORY = 1 << 27  # values of the models of one checkpoint: 512 MiB of float32
_MOST_READ = 1 << 28  # values of the models of all checkpoints
_FEW = 10  # clients
_MOST_IN_DOUBLE = 1 << 23  # values; larger layers are not copied to float64


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of a layer in some clients' models: ids [m] and rows [m, n]."""

    clients: np.ndarray
    weights: np.ndarray


def plot_cosines(checkpoints: Sequence[Checkpoint]) -> list[Matrices | Curves | Missing]:
    """The cosines of every two clients in the last checkpoint, and the mean over all pairs by round.

    Raises:
        CheckpointError: a file is damaged, or lacks the description of personal models.
    """
    last = checkpoints[-1]
    size = _count_model_values(last)
    chosen = choose_clients(last, _count_affordable_clients(size, 1))
    differing = {
        name: layer
        for name, layer in read_layers(last, chosen).items()
        if len(layer.clients) > 1 and (layer.weights != layer.weights[0]).any()
    }
    if not differing:
        return [Missing(_COSINE_TITLE, _SAME)]
    caption = f"Cosine between the weights of a layer in two clients' models. {describe_chosen_clients(last, chosen)}"
    matrices = _plot_layer_matrices(
        "layer_cosines",
        f"{_COSINE_TITLE}, round {last.number}",
        caption.strip(),
        "cosine",
        {name: (layer.clients, _compute_cosines(layer.weights)) for name, layer in differing.items()},
    )
    return [matrices, _plot_cosines_over_rounds(checkpoints, list(differing), size)]


def read_layers(checkpoint: Checkpoint, clients: np.ndarray) -> dict[str, Layer]:
    """The layers of body and head of some clients (ascending ids), by name; each cohort has layers of its own."""
    model = get_comparable_model(checkpoint)
    layers = {}
    for cohort, members in checkpoint.cohorts.items():
        rows: dict[str, list[np.ndarray]] = {}
        ids = clients[np.isin(clients, members)]
        for state in read_client_states(checkpoint, ids.tolist()):
            arrays: dict[str, list[np.ndarray]] = {}  # layer -> its weights, biases, ...
            for path, array in sorted(assemble_model(checkpoint, model, state).items()):
                if not path.startswith("stats/"):
                    arrays.setdefault(path.rpartition("/")[0], []).append(array.ravel())
            for name, parts in arrays.items():
                rows.setdefault(name, []).append(np.concatenate(parts))
        prefix = f"{cohort}/" if len(checkpoint.cohorts) > 1 else ""
        layers.update({prefix + name: Layer(ids, np.stack(weights)) for name, weights in rows.items()})
    return layers


def select_pairs(matrix: np.ndarray) -> np.ndarray:
    """The values [n] above the diagonal of a symmetric matrix, without NaNs."""
    above = matrix[np.triu_indices(len(matrix), 1)]
    return np.asarray(above[~np.isnan(above)])


def _are_alike(matrix: np.ndarray) -> bool:
    """Whether all known similarities are 1 up to rounding, so that there is nothing to draw."""
    values = select_pairs(matrix)
    return not len(values) or bool(np.abs(values - 1).max() <= _ROUNDING)


def _compute_cosines(weights: np.ndarray) -> np.ndarray:
    """The cosines between the rows of weights [m, n], [m, m]."""
    flat = weights.astype(np.float64) if weights.size < _MOST_IN_DOUBLE else weights
    gram = flat @ flat.T
    norms = np.sqrt(np.diag(gram))
    return np.asarray(gram / np.maximum(norms[:, np.newaxis] * norms, np.finfo(np.float64).tiny))


def _plot_cosines_over_rounds(checkpoints: Sequence[Checkpoint], names: Sequence[str], size: int) -> Curves:
    """The mean cosine over pairs of clients by round, a curve for each layer; `size` is the values of a model."""
    most = _count_affordable_clients(size, len(checkpoints))
    if len(checkpoints) > 3 and most < _FEW:  # for large models, rather fewer rounds than fewer clients
        checkpoints = pick_evenly_spaced(checkpoints, 3)
        most = _count_affordable_clients(size, len(checkpoints))
    means: dict[str, list[float]] = {name: [] for name in names}
    clients = choose_clients(checkpoints[-1], most)
    for checkpoint in checkpoints:
        layers = read_layers(checkpoint, clients)
        for name, values in means.items():
            values.append(float(select_pairs(_compute_cosines(layers[name].weights)).mean()))
    rounds = np.array([checkpoint.number for checkpoint in checkpoints])
    return Curves(
        name="layer_cosines_over_rounds",
        title=f"{_COSINE_TITLE} over rounds",
        caption=f"Mean over all pairs of clients. {describe_chosen_clients(checkpoints[-1], clients)}".strip(),
        y_label="mean cosine",
        curves=tuple(
            Curve(name, rounds, np.array(values), style=style) for style, (name, values) in enumerate(means.items())
        ),
    )


def _count_model_values(checkpoint: Checkpoint) -> int:
    """Number of values of the largest model of any cohort."""
    firsts = sorted(int(members[0]) for members in checkpoint.cohorts.values())
    model = get_comparable_model(checkpoint)
    models = [assemble_model(checkpoint, model, state) for state in read_client_states(checkpoint, firsts)]
    return max(1, *(sum(array.size for array in arrays.values()) for arrays in models))


def _count_affordable_clients(size: int, count: int) -> int:
    """Number of clients whose models, of `size` values each, may be read from each of `count` checkpoints."""
    return max(2, min(MOST_CLIENTS, _MOST_IN_MEMORY // size, _MOST_READ // (size * count)))


def plot_cka(run: Run) -> list[Matrices | Curves | Missing]:
    """CKA of every two clients for some layers of the last probe, and the mean CKA for all layers and probes.

    Raises:
        CheckpointError: a probe is damaged, or of a newer format.
    """
    rounds = probe_file.rounds(run.path)
    if not rounds:
        return [Missing(_CKA_TITLE, NOT_PROBED)]
    probes = [probe_file.read(run.path, number) for number in pick_evenly_spaced(rounds, _MOST_PROBES)]
    last = probes[-1]
    if not last.layers:
        return [Missing(_CKA_TITLE, f"the probe of round {last.round} has noted the outputs of no layer")]
    if all(_are_alike(layer.cka) for probe in probes for layer in probe.layers.values()):
        return [Missing(_CKA_TITLE, _SAME)]
    matrices = _plot_layer_matrices(
        "layer_cka",
        f"{_CKA_TITLE}, round {last.round}",
        f"Between the outputs of a layer of two clients' models for the same {last.samples} test samples.",
        "CKA",
        {name: (layer.clients, layer.cka) for name, layer in last.layers.items()},
    )
    return [matrices, _plot_cka_by_layer(probes)]


def _plot_cka_by_layer(probes: Sequence[probe_file.Probe]) -> Curves:
    """Mean CKA over pairs of clients by layer, a curve for each probe, with a band for the last one."""
    names = tuple(dict.fromkeys(name for probe in probes for name in probe.layers))
    x = np.arange(1, len(names) + 1)
    curves = []
    for style, probe in enumerate(probes):
        values = [select_pairs(probe.layers[name].cka) if name in probe.layers else np.empty(0) for name in names]
        low, mean, high = np.array([_compute_quantiles_and_mean(cka) for cka in values]).T
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


def _compute_quantiles_and_mean(values: np.ndarray) -> tuple[float, float, float]:
    """The 5th percentile, the mean and the 95th percentile; NaN without values."""
    if not len(values):
        return np.nan, np.nan, np.nan
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(values.mean()), float(high)


def _plot_layer_matrices(
    name: str, title: str, caption: str, value_label: str, by_layer: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Matrices | Missing:
    """Matrices of some of the layers that differ between clients, each with its own colour scale.

    Args:
        by_layer: the ids [m] of clients and their similarities [m, m].
    """
    names = [layer for layer, (_, values) in by_layer.items() if not _are_alike(values)]
    if not names:
        return Missing(title, _SAME)
    if alike := [layer for layer in by_layer if layer not in names]:
        caption += f" The same in all clients, and not drawn: {', '.join(alike)}."
    drawn = pick_evenly_spaced(names, _MOST_LAYERS)
    if len(drawn) < len(names):
        caption += f" {len(drawn)} of {len(names)} layers."
    panels = []
    for layer in drawn:
        clients, values = by_layer[layer]
        panels.append(Panel(layer, values, clients.tolist(), clients.tolist()))
    return Matrices(
        name=name,
        title=title,
        caption=f"{caption} The diagonal is 1 and not drawn. Each layer has its own scale.",
        row_label="client",
        column_label="client",
        value_label=value_label,
        panels=tuple(panels),
        own_scales=True,
        hide_diagonal=True,
    )
