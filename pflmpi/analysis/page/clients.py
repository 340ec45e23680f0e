"""What the script of a page shows of a client that is picked: its trajectory, class counts, and layers, in each run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pflmpi.analysis.plots import Matrices, Panel
from pflmpi.analysis.selection import NamedRun, spread_over
from pflmpi.analysis.series.accuracy import client_accuracy
from pflmpi.analysis.series.partition import class_names, counts_of
from pflmpi.analysis.side_by_side import Figures

_MOST_CLIENTS = 500
_LAYERS = {"layer_cosines": "mean cosine with the other clients", "layer_cka": "mean CKA with the other clients"}


def clients(among: Sequence[NamedRun], figures: Sequence[Figures]) -> dict[str, Any] | None:
    """The numbers of the first clients of runs, as JSON has them; None where no checkpoint tells clients apart.

    Args:
        figures: of each run.
    """
    counts: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for one, own in zip(among, figures, strict=False):
        accuracy = client_accuracy(one.run, spread_over(one.run.rounds))
        if not accuracy:
            continue
        held = _counts(one)
        if held is not None and held not in counts:
            counts.append(held)
        values = 100 * np.stack(list(accuracy.values()), axis=1)
        runs.append(
            {
                "label": one.label,
                "style": one.style,
                "counts": -1 if held is None else counts.index(held),
                "trajectories": [
                    {"title": "accuracy (%)", "rounds": list(accuracy), "values": _rounded(values)},
                    *_numbers(own),
                ],
                "layers": _layers(own),
            }
        )
    most = max((len(run["trajectories"][0]["values"]) for run in runs), default=0)
    return {"clients": most, "counts": counts, "runs": runs} if runs else None


def _counts(one: NamedRun) -> dict[str, Any] | None:
    found = counts_of(one.run)
    if found is None:
        return None
    names = class_names(one.run, found.train.shape[1])
    return {
        "classes": names,
        "train": found.train[:_MOST_CLIENTS].tolist(),
        "test": found.test[:_MOST_CLIENTS].tolist(),
    }


def _numbers(figures: Figures) -> list[dict[str, Any]]:
    """The numbers of each client over rounds that the algorithm shows, such as beta."""
    return [
        {"title": plot.title, "rounds": list(plot.panels[0].columns), "values": _rounded(plot.panels[0].values)}
        for plot in figures
        if isinstance(plot, Matrices) and (plot.row_label, plot.column_label) == ("client", "round")
    ]


def _layers(figures: Figures) -> dict[str, dict[str, dict[str, float | None]]]:
    """By measure, layer and client: how similar the client's layer is to those of the others, on average."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for plot in figures:
        if isinstance(plot, Matrices) and plot.name in _LAYERS:
            found[_LAYERS[plot.name]] = {panel.title: _with_others(panel) for panel in plot.panels}
    return found


def _with_others(panel: Panel) -> dict[str, float | None]:
    values = np.array(panel.values, np.float64)
    np.fill_diagonal(values, np.nan)
    known = np.isfinite(values)
    sums = np.where(known, values, 0).sum(1)
    means = np.divide(sums, known.sum(1), out=np.full(len(values), np.nan), where=known.any(1))
    (rounded,) = _rounded(means[np.newaxis])
    return dict(zip(map(str, panel.rows), rounded, strict=True))


def _rounded(values: np.ndarray) -> list[list[float | None]]:
    """Values [N, n] with four digits, None where one is not known; of the first clients."""
    shown = values[:_MOST_CLIENTS].tolist()
    return [[float(f"{value:.4g}") if np.isfinite(value) else None for value in row] for row in shown]
