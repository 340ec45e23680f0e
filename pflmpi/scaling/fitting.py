"""The model of a round fitted to what was measured."""

from collections.abc import Sequence

import numpy as np

from pflmpi.errors import ConfigError
from pflmpi.scaling.model import PARTS, Fitted, Model, Size, Term
from pflmpi.scaling.results import Results

LEAST_POINTS = 3


def check(mode: str, ranks: Sequence[int], to: int) -> None:
    """Raise `ConfigError` where a model cannot be fitted to so many ranks, or they are as many as `to` or more."""
    if mode == "packing":
        raise ConfigError("--to with mode packing: its ranks share one machine, which says nothing of more machines")
    if len(ranks) < LEAST_POINTS:
        raise ConfigError(
            f"--to needs {LEAST_POINTS} numbers of ranks that were measured, and there are {len(ranks)}; measure more "
            "with --ranks"
        )
    if to <= max(ranks):
        raise ConfigError(f"--to {to}: must be more than {max(ranks)}, the largest number of ranks that was measured")


def fit(results: Results, to: int) -> Model:
    """The model of an experiment, for up to so many ranks.

    Raises:
        ConfigError: as in `check`, or the data of the runs is not there, which the schedule needs.
    """
    from pflmpi.scaling.sizes import sizes  # imports torch, which what was measured is shown without

    points = results.measured
    check(results.scaling.mode, [point.ranks for point in points], to)
    size, parts = sizes(results), {}
    runs = [run for point in points for run in point.runs]
    for name, (measured_by, terms) in PARTS.items():
        seconds = [sum(float(run.measured(run.parts[part]).mean()) for part in measured_by) for run in runs]
        parts[name] = _fitted(terms, [size(run.one.ranks) for run in runs], np.array(seconds))
    return Model(parts, size, points[-1].ranks)


def _fitted(terms: dict[str, Term], sizes: Sequence[Size], seconds: np.ndarray) -> Fitted:
    """Least squares with coefficients that are not negative: the most negative one is left out until none is."""
    left = dict(terms)
    while True:
        rows = np.array([[term(size) for term in left.values()] for size in sizes]).reshape(len(sizes), len(left))
        scale = np.abs(rows).max(axis=0, initial=1e-300)  # bytes are many, and latencies few
        values = np.linalg.lstsq(rows / scale, seconds, rcond=None)[0] / scale
        if not len(left) or values.min() >= 0:
            break
        left.pop(list(left)[int(np.argmin(values * scale))])
    freedom = max(len(sizes) - len(left), 1)
    residuals = seconds - rows @ values
    variance = float(residuals @ residuals) / freedom
    inverse = np.linalg.pinv((rows / scale).T @ (rows / scale)) / np.outer(scale, scale)
    return Fitted(left, values, variance * inverse, variance, freedom)
