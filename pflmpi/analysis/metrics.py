"""metrics.csv by column, and the cost to reach a target."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pflmpi.errors import ConfigError
from pflmpi.learning.main_measure import ACCURACY, MainMeasure, choose_judging_column, lower_is_better
from pflmpi.registry import format_unknown_name
from pflmpi.store import metrics_file
from pflmpi.store.verify import Metrics
from pflmpi.text import short_repr

CONFIDENCE = 0.95  # level of confidence intervals


def parse_columns(metrics: Metrics) -> dict[str, np.ndarray]:
    """Verified metrics by column, each [rounds].

    Counts and bytes are int64; accuracies (fractions) and seconds are float64, NaN where a round has no value. If the
    metrics of rounds are lost, all columns but `round` are float64, and NaN in these rounds.
    """
    rows = [text.split(",") for text in metrics.texts]
    columns = {name: _parse_column(name, [row[place] for row in rows]) for place, name in enumerate(metrics.names)}
    if metrics.lost:
        is_lost = columns["round"] <= metrics.lost
        columns |= {name: np.where(is_lost, np.nan, columns[name]) for name in columns if name != "round"}
    return columns


def find_best_round(
    columns: Mapping[str, np.ndarray], rounds: np.ndarray | slice = slice(None), measure: MainMeasure = ACCURACY
) -> int | None:
    """Index of the best round by a measure; None if no round has a value.

    If there are validation samples, they choose the round, among those with a value on test samples.

    Args:
        rounds: mask or slice of the rounds to choose from; the returned index counts these.
    """
    judge = columns[choose_judging_column(measure.column, columns)]
    values = np.where(np.isnan(columns[measure.column]), np.nan, judge)[rounds]
    if np.isnan(values).all():
        return None
    return int(np.nanargmin(values) if measure.lower else np.nanargmax(values))


def compute_mean(values: Sequence[float] | Sequence[np.ndarray] | np.ndarray) -> Any:
    """The mean of numbers, or of arrays [n, ...] over the first axis; NaN where infinities of both signs leave it open.

    >>> float(compute_mean([1.0, math.inf])), float(compute_mean([math.inf, -math.inf]))
    (inf, nan)
    """
    with np.errstate(invalid="ignore"):
        return np.mean(values, axis=0)


def compute_deviation(values: Sequence[float]) -> float:
    """The sample standard deviation of values; NaN of fewer than two, and of values that are not finite.

    >>> compute_deviation([1.0, 3.0, 5.0]), compute_deviation([1.0]), compute_deviation([math.inf, math.inf])
    (2.0, nan, nan)
    """
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def compute_margin_of_error(values: ArrayLike) -> np.ndarray:
    """Half the width of the confidence interval (Student's t) of the mean of values [n, ...], n > 1; [...].

    >>> round(float(compute_margin_of_error([1.0, 2.0, 3.0])), 4)  # 4.3027 / sqrt(3)
    2.4841
    """
    values = np.asarray(values)
    special: Any = import_module("scipy.special")  # imported here because few commands need it
    quantile = special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
    with np.errstate(invalid="ignore"):  # the deviation of infinite values is NaN
        return np.asarray(quantile * values.std(0, ddof=1) / len(values) ** 0.5)


def _parse_column(name: str, texts: Sequence[str]) -> np.ndarray:
    if metrics_file.is_count(name):
        return np.array([int(text) for text in texts], np.int64)
    return np.array([float(text or "nan") for text in texts], np.float64)


@dataclass(frozen=True)
class CostTo:
    """The cost of reaching a target.

    Attributes:
        rounds: number of rounds, including the one that reaches it.
        seconds: duration of these rounds.
        up_bytes, down_bytes: logical bytes to and from the server.
    """

    rounds: int
    seconds: float
    up_bytes: int
    down_bytes: int


def compute_cost_to(columns: Mapping[str, np.ndarray], target: float, metric: str = "accuracy_mean") -> CostTo | None:
    """The cost up to the first round that reaches a target; None if no round does, or metrics of rounds are lost.

    Args:
        columns: columns of metrics.csv.
        target: a lower bound, or an upper bound for losses and errors; accuracies are shares.
        metric: a column.

    Raises:
        ConfigError: there is no such column, or the target is impossible for it.
    """
    if metric not in columns:
        raise ConfigError(format_unknown_name("column of metrics.csv", metric, list(columns)))
    check_target("target", target, metric)
    values = columns[metric]
    reached = np.flatnonzero(
        values <= target if lower_is_better(metric) else values >= target
    )  # comparing NaN is False
    if not len(reached):
        return None
    until = slice(0, int(reached[0]) + 1)
    seconds, up, down = (columns[name][until].sum() for name in ("seconds", "up_bytes", "down_bytes"))
    if np.isnan(up):  # metrics of rounds are lost
        return None
    return CostTo(int(columns["round"][reached[0]]), float(seconds), int(up), int(down))


def check_target(name: str, target: object, metric: str = "accuracy_mean") -> None:
    """Raises `ConfigError` for an impossible target: accuracy and F1 are shares above 0, others any finite number."""
    is_share = "accuracy" in metric or metric.startswith("f1")
    number = float(target) if not isinstance(target, bool) and isinstance(target, Real) else float("nan")
    if not (0 < number <= 1 if is_share else np.isfinite(number)):
        allowed = "a share above 0 and at most 1, such as 0.9 for 90 %" if is_share else "a number"
        raise ConfigError(f"{name} = {short_repr(target)}: must be {allowed}")
