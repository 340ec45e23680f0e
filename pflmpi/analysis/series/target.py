"""What a run has cost when a measure first was as good as a target."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pflmpi.errors import ConfigError
from pflmpi.learning.early_stop import lower_is_better
from pflmpi.registry import unknown


@dataclass(frozen=True)
class CostTo:
    """The cost of the rounds up to one, that one included.

    Attributes:
        rounds: how many.
        seconds: of these rounds.
        up_bytes, down_bytes: logical bytes to and from the server.
    """

    rounds: int
    seconds: float
    up_bytes: int
    down_bytes: int


def cost_to(columns: Mapping[str, np.ndarray], target: float, metric: str = "accuracy_mean") -> CostTo | None:
    """The cost until the first round that reaches a target; None if none does.

    Args:
        columns: of metrics.csv.
        target: at least this much, or at most in a column of losses; accuracies are shares.
        metric: a column.

    Raises:
        ConfigError: there is no such column.
    """
    if metric not in columns:
        raise ConfigError(unknown("column of metrics.csv", metric, list(columns)))
    values = columns[metric]
    reached = np.flatnonzero(values <= target if lower_is_better(metric) else values >= target)  # never NaN
    if not len(reached):
        return None
    until = slice(0, int(reached[0]) + 1)
    seconds, up, down = (columns[name][until].sum() for name in ("seconds", "up_bytes", "down_bytes"))
    return CostTo(int(columns["round"][reached[0]]), float(seconds), int(up), int(down))
