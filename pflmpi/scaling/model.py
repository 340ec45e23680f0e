"""A model of a round, and what it says of numbers of ranks that were not measured.

    seconds = fixed + client c + imbalance c (1 - 1/r) + server + latency h + byte b + checkpoint

with r ranks and c clients of each that computes; h delays and b bytes follow each other until the messages have
arrived. These sizes are those of the schedule (see `sizes`), for any number of ranks; the coefficients are fitted by
least squares to what was measured of each part: compute and evaluation, waiting, exchange, checkpoint. A coefficient
that would be negative is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

FAR = 10  # times the largest number of ranks that was measured: beyond, the extrapolation is said to be far


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Size:
    """A round on a number of ranks.

    Attributes:
        ranks: how many.
        clients: of each rank that computes.
        delays, path_bytes: of the messages, that follow each other; what passes at the same time counts once.
        wire_bytes: between all ranks.
    """

    ranks: int
    clients: float
    delays: float
    path_bytes: float
    wire_bytes: float


Term = Callable[[Size], float]
# For each part: what it is measured by, and its terms by coefficient.
PARTS: dict[str, tuple[tuple[str, ...], dict[str, Term]]] = {
    "compute": (("compute", "evaluation"), {"fixed": lambda _: 1.0, "client": lambda size: size.clients}),
    "waiting": (("waiting",), {"imbalance": lambda size: size.clients * (1 - 1 / size.ranks)}),
    "exchange": (
        ("exchange",),
        {
            "server": lambda _: 1.0,
            "latency": lambda size: size.delays,
            "byte": lambda size: size.path_bytes,
        },
    ),
    "checkpoint": (("checkpoint",), {"checkpoint": lambda _: 1.0}),
}
MEANINGS = {
    "fixed": "s, of a round on each rank",
    "client": "s, of a client: training and evaluation",
    "imbalance": "s, of a client: waiting for the slowest rank",
    "server": "s, of a round on rank 0",
    "latency": "s, of a delay between two ranks",
    "byte": "s, of a byte between two ranks",
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
    """The fitted parts, and the sizes that they are for.

    Attributes:
        parts: by name.
        size: of a round on a number of ranks.
        largest: number of ranks that was measured.
    """

    parts: dict[str, Fitted]
    size: Callable[[int], Size]
    largest: int

    def is_far(self, ranks: int) -> bool:
        """Whether so many ranks are far beyond those that were measured."""
        return ranks > FAR * self.largest

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


def _quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution.

    >>> [round(_quantile(freedom), 2) for freedom in (1, 4, 10, 1000)]
    [12.71, 2.78, 2.23, 1.96]
    """
    special: Any = import_module("scipy.special")  # here: few commands need it
    return float(special.stdtrit(freedom, 0.975))
