"""Early stopping: a run ends once a metric has not improved for some rounds. Only metrics.csv decides that."""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pflmpi.learning.main_measure import choose_judging_column, lower_is_better
from pflmpi.text import pluralize

_METRICS = (
    *("accuracy_mean", "accuracy_weighted", "accuracy_bottom", "f1_macro", "test_loss", "train_loss"),
    *("unseen_accuracy_mean", "unseen_accuracy_weighted"),
)


class EarlyStopConfig(BaseModel):
    """When a run ends before its last round."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(
        description="column of metrics.csv that is watched, also of a measure, such as auroc_mean, of validation "
        "samples where there are some; of losses and errors lower is better, of the rest higher"
    )
    patience: int = Field(ge=1, description="rounds without improvement after which the run ends")
    min_delta: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="only a change by more than this is an improvement"
    )

    @field_validator("metric")
    @classmethod
    def _is_column(cls, metric: str) -> str:
        """The names of measures are checked later, once the run's measures are known."""
        if metric not in _METRICS and not metric.endswith(("_mean", "_weighted", "_bottom")):
            raise ValueError(f"must be one of {', '.join(_METRICS)}, or a measure's, such as auroc_mean")
        return metric


class EarlyStop:
    """Decides from the lines of metrics.csv so far whether a run ends; the same for a resumed run.

    Args:
        config: None: the run never ends early.
        lines: of metrics.csv, in order.
    """

    def __init__(self, config: EarlyStopConfig | None = None, lines: Iterable[Mapping[str, str | int]] = ()) -> None:
        self._config = config
        self._best, self._best_round, self._last_round, self._column = math.nan, 0, 0, ""
        self._first_met: int | None = None
        for line in lines:
            self.add(line)

    @classmethod
    def of(cls, training: Mapping[str, Any], lines: Iterable[Mapping[str, str | int]]) -> "EarlyStop":
        """From a run's `training` section as plain values; raises `ValueError` if its `stop` is invalid."""
        stop = training.get("stop")
        return cls(None if stop is None else EarlyStopConfig.model_validate(stop), lines)

    def add(self, line: Mapping[str, str | int]) -> None:
        """Adds the line of the next round; rounds in which the metric was not measured do not count."""
        if self._config is None:
            return
        self._column = choose_judging_column(self._config.metric, line)
        if (text := line.get(self._column, "")) == "":
            return
        value, self._last_round = float(text), int(line["round"])
        if self._best_round == 0 or self._is_improvement(value, self._config):
            self._best, self._best_round = value, self._last_round
        if self._first_met is None and self.met:
            self._first_met = self._last_round

    @property
    def met(self) -> bool:
        """Whether the run ends after the last line."""
        return self._config is not None and self._last_round - self._best_round >= self._config.patience

    def last_round(self, rounds: int) -> int:
        """The round after which a run of at most `rounds` ends, even if the lines go on, by another rule."""
        return min(rounds, self._first_met or rounds)

    @property
    def why(self) -> str:
        """The reason in words; "" if the run does not end."""
        if self._config is None or not self.met:
            return ""
        by = f" by more than {self._config.min_delta:g}" if self._config.min_delta else ""
        rounds = pluralize(self._last_round - self._best_round, "round")
        return f"{self._column} has not improved{by} on {self._best:g} of round {self._best_round} for {rounds}"

    def _is_improvement(self, value: float, config: EarlyStopConfig) -> bool:
        """Whether a value is better than the best so far; never if it is not finite."""
        if not math.isfinite(value) or not math.isfinite(self._best):
            return math.isfinite(value)
        gain = Decimal(repr(value)) - Decimal(repr(self._best))  # exact for the decimals in metrics.csv
        return (-gain if lower_is_better(config.metric) else gain) > Decimal(repr(config.min_delta))
