"""What a fitted model says of numbers of ranks that were not measured, as figures."""

import numpy as np

from pflmpi.analysis.plots import Curve, Curves
from pflmpi.scaling.fitting import fit
from pflmpi.scaling.model import Model
from pflmpi.scaling.results import Results
from pflmpi.text import size

EXTRAPOLATION = "extrapolation"  # how the names of the figures begin
_POINTS = 24  # of the curve


def extrapolations(among: dict[str, Results], to: int) -> list[Curves]:
    """A figure for each experiment: the points that were measured, and apart from them the model with its interval.

    Raises:
        ConfigError: no model can be fitted, or there is nothing to extrapolate.
    """
    found = []
    for number, (name, results) in enumerate(among.items()):
        model = fit(results, to)
        found.append(_figure(results, model, to, "" if len(among) == 1 else f"_{number + 1}", name))
    return found


def _figure(results: Results, model: Model, to: int, ending: str, name: str) -> Curves:
    points, style = results.measured, 0
    ranks = np.unique(np.geomspace(points[0].ranks, to, _POINTS).round().astype(int))
    values, low, high = np.array([model.seconds(int(count)) for count in ranks]).T
    x = np.array([point.ranks for point in points], np.float64)
    measured_low, measured_high = np.array([point.spread for point in points]).T
    measured = np.array([point.seconds for point in points])
    last = model.seconds(to)
    far = " That is far beyond what was measured: take it as a direction." if model.is_far(to) else ""
    said = "; ".join(
        f"{key} {one.value:.3g} ({one.low:.3g} to {one.high:.3g})" for key, one in model.coefficients().items()
    )
    return Curves(
        name=f"{EXTRAPOLATION}{ending}",
        title=f"Extrapolation to {to} ranks{f': {name}' if ending else ''}",
        caption=f"Markers: measured. Dotted: the model fitted to them, with its 95 % interval. At {to} ranks: "
        f"{last.value:.3g} s ({last.low:.3g} to {last.high:.3g}), and {size(model.size(to).wire_bytes)} "
        f"between ranks by the schedule.{far} Coefficients in seconds: {said}.",
        x_label="ranks",
        y_label="seconds per round",
        curves=(
            Curve("measured", x, measured, measured_low, measured_high, style=style, source=name),
            Curve("model, and its 95 % interval", ranks.astype(np.float64), values, low, high, style=1, thin=True),
        ),
        x_log=True,
        x_ticks=tuple(sorted({*(point.ranks for point in points), to})),
        zero=True,
    )
