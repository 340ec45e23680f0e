"""A model of a round, fitted to the points that were measured, and what it says of other numbers of ranks.

    seconds = fixed + client c + imbalance c (1 - 1/r) + server + latency log2(r) + bytes / bandwidth + checkpoint

with r ranks and c clients of each that computes. Each part is fitted by least squares to what was measured of it:
compute and evaluation, waiting, exchange, checkpoint. A coefficient that would be negative is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2, sqrt
from typing import NamedTuple

import numpy as np

from pflmpi.errors import ConfigError
from pflmpi.scaling.results import MeasuredRun, Results

LEAST_POINTS = 3
FAR = 10  # times the largest number of ranks that was measured: beyond, the extrapolation is said to be far


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Size:
    """A number of ranks, the clients of each rank that computes in a round, and bytes between all ranks."""

    ranks: int
    clients: float
    wire_bytes: float


Term = Callable[[Size], float]
# For each part: what it is measured by, and its terms by coefficient.
_PARTS: dict[str, tuple[tuple[str, ...], dict[str, Term]]] = {
    "compute": (("compute", "evaluation"), {"fixed": lambda _: 1.0, "client": lambda size: size.clients}),
    "waiting": (("waiting",), {"imbalance": lambda size: size.clients * (1 - 1 / size.ranks)}),
    "exchange": (
        ("exchange",),
        {
            "server": lambda _: 1.0,
            "latency": lambda size: ceil(log2(size.ranks)),
            "byte": lambda size: size.wire_bytes,
        },
    ),
    "checkpoint": (("checkpoint",), {"checkpoint": lambda _: 1.0}),
}
MEANINGS = {
    "fixed": "s, of a round on each rank",
    "client": "s, of a client: training and evaluation",
    "imbalance": "s, of a client: waiting for the slowest rank",
    "server": "s, of a round on rank 0",
    "latency": "s, each time the ranks double",
    "byte": "s, of a byte between ranks",
    "checkpoint": "s, of a round",
}


@dataclass(frozen=True)
class Fitted:
    """A part of the model.

    Attributes:
        terms: those with a coefficient above 0.
        values: [p] coefficients.
        covariance: [p, p] of the coefficients.
        variance: of what was measured of a run around the model.
        freedom: degrees of freedom that this was estimated with.
    """

    terms: dict[str, Term]
    values: np.ndarray
    covariance: np.ndarray
    variance: float
    freedom: int

    def at(self, size: Size) -> tuple[float, float]:
        """Seconds, and their half interval."""
        row = np.array([term(size) for term in self.terms.values()])
        spread = float(row @ self.covariance @ row) + self.variance
        return float(row @ self.values), _quantile(self.freedom) * sqrt(max(spread, 0.0))


@dataclass(frozen=True)
class Model:
    """The fitted parts, and what is known of the sizes between and beyond the points."""

    parts: dict[str, Fitted]
    participants: Callable[[int], float]
    wire_bytes: float  # for each rank after the first
    largest: int  # number of ranks that was measured

    def is_far(self, ranks: int) -> bool:
        """Whether so many ranks are far beyond those that were measured."""
        return ranks > FAR * self.largest

    def size(self, ranks: int) -> Size:
        """The work of a round on so many ranks; no rank that computes has less than one client."""
        return Size(ranks, max(self.participants(ranks) / ranks, 1.0), self.wire_bytes * (ranks - 1))

    def seconds(self, ranks: int) -> Estimate:
        """Seconds of a round with their interval; errors of the parts are taken to be independent."""
        found = [part.at(self.size(ranks)) for part in self.parts.values()]
        value, half = sum(one for one, _ in found), sqrt(sum(one**2 for _, one in found))
        return Estimate(value, max(value - half, 0.0), value + half)

    def coefficients(self) -> dict[str, Estimate]:
        """The fitted coefficients."""
        found = {}
        for part in self.parts.values():
            widths = _quantile(part.freedom) * np.sqrt(np.diag(part.covariance))
            for name, value, width in zip(part.terms, part.values.tolist(), widths.tolist(), strict=True):
                found[name] = Estimate(value, max(value - width, 0.0), value + width)
        return found


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
    """The model of an experiment, for up to so many ranks; raises as `check` does."""
    points, scaling = results.measured, results.scaling
    check(scaling.mode, [point.ranks for point in points], to)
    runs = [run for point in points for run in point.runs]
    sizes = [Size(run.one.ranks, max(_participants(run) / run.one.ranks, 1.0), run.wire_bytes) for run in runs]
    parts = {}
    for name, (measured_by, terms) in _PARTS.items():
        seconds = [sum(float(run.measured(run.parts[part]).mean()) for part in measured_by) for run in runs]
        parts[name] = _fitted(terms, sizes, np.array(seconds))
    others = np.array([size.ranks - 1 for size in sizes])
    wire = float(others @ [size.wire_bytes for size in sizes]) / max(float(others @ others), 1.0)
    each = float(np.mean([_participants(run) / (run.one.ranks if scaling.mode == "weak" else 1) for run in runs]))
    return Model(
        parts, (lambda ranks: each * ranks) if scaling.mode == "weak" else (lambda _: each), wire, points[-1].ranks
    )


def _participants(run: MeasuredRun) -> float:
    return float(run.measured(run.columns["participants"]).mean())


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


def _quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution (Cornish and Fisher's expansion from 3 degrees on).

    >>> [round(_quantile(freedom), 2) for freedom in (1, 4, 10, 1000)]
    [12.71, 2.77, 2.23, 1.96]
    """
    if freedom < 3:
        return {1: 12.706, 2: 4.303}[freedom]
    z: float = 1.959964
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))
