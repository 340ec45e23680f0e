"""How alike the layers of the clients' models are on a batch of samples, from what `pflmpi probe` has left."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pflmpi.analysis.plots import Curve, Curves, Matrices, Missing, Panel
from pflmpi.analysis.run import Run
from pflmpi.analysis.series.selection import spread_over
from pflmpi.store import probe_file
from pflmpi.store.probe_file import Alike, Probe

_TITLE = "CKA of the clients' layers"
_MOST_ROUNDS = 6  # curves
_MOST_LAYERS = 6  # matrices in the figure; the curves have all


def probes(run: Run) -> list[Matrices | Curves | Missing]:
    """Return the CKA of every two clients for some layers of the last probe, and the mean for all layers and probes.

    Raises:
        CheckpointError: a probe is damaged, or of a newer format.
    """
    there = probe_file.rounds(run.path)
    if not there:
        return [Missing(_TITLE, f"`pflmpi probe {run.path}`, where torch and the data are, has not been run")]
    found = [probe_file.read(run.path, number) for number in spread_over(there, _MOST_ROUNDS)]
    return [matrices(found[-1]), through_layers(found)]


def matrices(probe: Probe) -> Matrices:
    """Return the CKA of every two clients for some layers, from the first to the last."""
    names = list(probe.layers)
    chosen = spread_over(range(len(names)), _MOST_LAYERS)
    several = f" {len(chosen)} of {len(names)} layers." if len(chosen) < len(names) else ""
    return Matrices(
        name="layer_cka",
        title=f"{_TITLE}, round {probe.round}",
        caption=f"Linear CKA (unbiased) between what a layer of two clients' models puts out for the same "
        f"{probe.samples} test samples: 1 alike, about 0 unrelated.{several} The diagonal is 1 and not drawn.",
        row_label="client",
        column_label="client",
        value_label="CKA",
        panels=tuple(_panel(names[place], probe.layers[names[place]]) for place in chosen),
        hide_diagonal=True,
    )


def through_layers(probes: Sequence[Probe]) -> Curves:
    """Return the mean CKA over pairs of clients from the first layer to the last, with a band for the last probe."""
    names = tuple(dict.fromkeys(name for probe in probes for name in probe.layers))
    x = np.arange(1, len(names) + 1)
    curves = []
    for style, probe in enumerate(probes):
        pairs = [_pairs(probe.layers[name].cka) if name in probe.layers else np.empty(0) for name in names]
        low, mean, high = np.array([_summary(values) for values in pairs]).T
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


def _panel(name: str, layer: Alike) -> Panel:
    ids = layer.clients.tolist()
    return Panel(name, layer.cka, ids, ids)


def _pairs(cka: np.ndarray) -> np.ndarray:
    values = cka[np.triu_indices(len(cka), 1)]
    known: np.ndarray = values[~np.isnan(values)]
    return known


def _summary(values: np.ndarray) -> tuple[float, float, float]:
    """Return the 5th percentile, the mean and the 95th percentile; NaN of nothing."""
    if not len(values):
        return np.nan, np.nan, np.nan
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(values.mean()), float(high)
