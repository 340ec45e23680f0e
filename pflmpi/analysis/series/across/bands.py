"""Accuracy of the clients of several runs over rounds, side by side."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pflmpi.analysis.plots import Curves
from pflmpi.analysis.series.scores import BAND, evaluated, of_run
from pflmpi.analysis.series.selection import NamedRun


def bands_over_rounds(runs: Sequence[NamedRun]) -> list[Curves]:
    """The bands over clients of several runs, side by side; no figure without any."""
    curves = [replace(of_run(one, True), label=one.label) for one in runs if evaluated(one.run).any()]
    if all(np.isnan(np.asarray(curve.low)).all() for curve in curves):
        return []
    figure = Curves(
        name="accuracy_of_clients",
        title="Accuracy of the clients over rounds",
        caption=f"Mean over clients of each run. {BAND}",
        x_label="round",
        y_label="accuracy (%)",
        curves=tuple(curves),
        apart=True,
        by_round=True,
        percent=True,
    )
    return [figure]
