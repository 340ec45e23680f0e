"""CKA between the layers of the clients' models, from the files of `pflmpi probe`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pflmpi.analysis.plots import Curve, Curves, Matrices, Missing
from pflmpi.analysis.run import Run
from pflmpi.analysis.series.pairs import layer_matrices, pairs
from pflmpi.analysis.series.selection import spread_over
from pflmpi.store import probe_file
from pflmpi.store.probe_file import Probe

_TITLE = "CKA of the clients' layers"
_MOST_ROUNDS = 6  # curves


def figures(run: Run) -> list[Matrices | Curves | Missing]:
    """CKA of every two clients for some layers of the last probe, and the mean for all layers and probes.

    Raises:
        CheckpointError: a probe is damaged, or of a newer format.
    """
    there = probe_file.rounds(run.path)
    if not there:
        return [Missing(_TITLE, f"`pflmpi probe {run.path}`, where torch and the data are, has not been run")]
    found = [probe_file.read(run.path, number) for number in spread_over(there, _MOST_ROUNDS)]
    return [matrices(found[-1]), through_layers(found)]


def matrices(probe: Probe) -> Matrices:
    """CKA of every two clients for some layers, from the first to the last."""
    return layer_matrices(
        "layer_cka",
        f"{_TITLE}, round {probe.round}",
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
        low, mean, high = np.array([_summary(values) for values in known]).T
        curve = Curve(f"round {probe.round}", x, mean, points=np.array(names), style=style)
        curves.append(replace(curve, low=low, high=high) if probe is probes[-1] else curve)
    return Curves(
        name="layer_cka_through_layers",
        title=f"{_TITLE}, from the first to the last",
        caption=f"Mean over all pairs of clients; nine in ten pairs of round {probes[-1].round} are in the band.",
        x_label="layer",
        y_label="mean CKA",
        curves=tuple(curves),
        x_names=names,
    )


def _summary(values: np.ndarray) -> tuple[float, float, float]:
    """The 5th percentile, the mean and the 95th percentile; NaN without values."""
    if not len(values):
        return np.nan, np.nan, np.nan
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(values.mean()), float(high)
