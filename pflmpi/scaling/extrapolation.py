"""Amdahl's law fitted to the measured points of a scaling experiment; see docs/scaling.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from pflmpi.analysis.plots import Curve, Curves
from pflmpi.errors import ConfigError
from pflmpi.scaling.results import Results

LEAST_POINTS = 3  # a fit has two parameters
_FAR = 10  # an extrapolation beyond this many times the largest measured number of ranks is pointed out
_POINTS = 24  # of the fitted curve


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} (95 %: {self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class AmdahlFit:
    """Amdahl's law fitted to an experiment."""

    first: float  # seconds of a round on one rank
    serial: Estimate  # the serial fraction, between 0 and 1
    base: int | None  # `Scaling.base` of a weak experiment; None of a strong one

    def seconds(self, ranks: int) -> Estimate:
        """Predicts the seconds of a round; the interval is that of the serial fraction."""
        return Estimate(*(float(_predict_seconds(ranks, self.first, serial, self.base)) for serial in self.serial))


def check(mode: str, ranks: Sequence[int], to: int) -> None:
    """Raises `ConfigError` if the measured points do not allow an extrapolation to `to` ranks."""
    if mode == "packing":
        raise ConfigError("--to with mode packing: its ranks share one machine, which says nothing of more machines")
    if len(ranks) < LEAST_POINTS:
        raise ConfigError(
            f"--to needs {LEAST_POINTS} numbers of ranks that were measured, and there are {len(ranks)}; measure more "
            "with --ranks"
        )
    if to <= max(ranks):
        raise ConfigError(f"--to {to}: must be more than {max(ranks)}, the largest number of ranks that was measured")


def fit(results: Results, to: int) -> AmdahlFit:
    """Fits the law by least squares to the median seconds of all runs.

    Raises:
        ConfigError: see `check`.
    """
    points, scaling = results.measured, results.scaling
    check(scaling.mode, [point.ranks for point in points], to)
    base = scaling.base if scaling.mode == "weak" else None
    ranks = np.array([point.ranks for point in points for _ in point.runs], np.float64)
    seconds = np.array([np.median(run.seconds) for point in points for run in point.runs])
    optimize: Any = import_module("scipy.optimize")  # imported here because few commands need it
    special: Any = import_module("scipy.special")
    start, bounds = (seconds[0], 0.5), ((1e-12, 0.0), (np.inf, 1.0))
    values, covariance = optimize.curve_fit(
        lambda r, first, serial: _predict_seconds(r, first, serial, base), ranks, seconds, start, bounds=bounds
    )
    quantile = float(special.stdtrit(max(len(ranks) - 2, 1), 0.975))  # of Student's t
    serial, half = float(values[1]), quantile * sqrt(covariance[1, 1])
    return AmdahlFit(float(values[0]), Estimate(serial, max(serial - half, 0.0), min(serial + half, 1.0)), base)


def summary(law: AmdahlFit, to: int, largest: int) -> str:
    """The serial fraction and the seconds on `to` ranks as text; `largest` is the largest measured number of ranks."""
    far = f", {to // largest} times the largest number that was measured" if to > _FAR * largest else ""
    return f"serial fraction {law.serial}; {to} ranks: {law.seconds(to)} s a round{far}"


def plot_extrapolations(named: dict[str, Results], to: int) -> list[Curves]:
    """A figure for each experiment: the measured points, and the fitted law up to `to` ranks.

    Raises:
        ConfigError: see `check`.
    """
    return [_plot_extrapolation(results, to, name, len(named) > 1) for name, results in named.items()]


def _plot_extrapolation(results: Results, to: int, name: str, several: bool) -> Curves:
    points, law = results.measured, fit(results, to)
    counts = np.unique(np.geomspace(points[0].ranks, to, _POINTS).round().astype(int))
    values, low, high = np.array([law.seconds(int(count)) for count in counts]).T
    measured_low, measured_high = np.array([point.spread for point in points]).T
    ranks = np.array([point.ranks for point in points], np.float64)
    seconds = np.array([point.seconds for point in points])
    return Curves(
        name="extrapolation",
        title=f"Extrapolation to {to} ranks{f': {name}' if several else ''}",
        caption=f"Markers: measured. Dashed: Amdahl's law fitted to them, with its 95 % interval; "
        f"{summary(law, to, points[-1].ranks)}.",
        x_label="ranks",
        y_label="seconds per round",
        curves=(
            Curve("measured", ranks, seconds, measured_low, measured_high, style=0, source=name),
            Curve("Amdahl's law", counts.astype(np.float64), values, low, high, style=1, thin=True),
        ),
        x_log=True,
        x_ticks=tuple(sorted({*(point.ranks for point in points), to})),
        zero=True,
    )


def _predict_seconds(ranks: Any, first: float, serial: float, base: int | None) -> Any:
    """Amdahl's law; in a weak experiment the work grows with the ranks."""
    work = 1.0 if base is None else ranks / base
    return work * first * (serial + (1 - serial) / ranks)
