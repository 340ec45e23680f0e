"""Early stop: a run ends once a metric has not become better for some rounds. Its metrics alone decide that."""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pflmpi.learning.main_measure import judged_by, lower_is_better
from pflmpi.text import pluralize

_WATCHED = (
    *("accuracy_mean", "accuracy_weighted", "accuracy_bottom", "f1_macro", "test_loss", "train_loss"),
    *("unseen_accuracy_mean", "unseen_accuracy_weighted"),
)


class EarlyStopConfig(BaseModel):
    """When a run ends before its last round."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: Annotated[
        str,
        Field(
            description="column of metrics.csv that is watched, also of a measure, such as auroc_mean, of validation "
            "samples where there are some; of losses and errors lower is better, of the rest higher"
        ),
    ]
    patience: Annotated[int, Field(ge=1, description="rounds without improvement after which the run ends")]
    min_delta: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="only a change by more than this is an improvement")
    ] = 0.0

    @field_validator("metric")
    @classmethod
    def _is_watched(cls, metric: str) -> str:
        """A measure is looked for among those of the run once these are known."""
        if metric not in _WATCHED and not metric.endswith(("_mean", "_weighted", "_bottom")):
            raise ValueError(f"must be one of {', '.join(_WATCHED)}, or a measure's, such as auroc_mean")
        return metric


class EarlyStop:
    """Whether a run ends, from the lines of its metrics so far; a run that is resumed comes to the same.

    Args:
        config: None: never.
        lines: of metrics.csv, in their order.
    """

    def __init__(self, config: EarlyStopConfig | None = None, lines: Iterable[Mapping[str, str | int]] = ()) -> None:
        self._config = config
        self._best, self._best_round, self._last, self._column = math.nan, 0, 0, ""
        for line in lines:
            self.add(line)

    @classmethod
    def of(cls, training: Mapping[str, Any], lines: Iterable[Mapping[str, str | int]]) -> "EarlyStop":
        """From the `training` section of a run as plain values; raises `ValueError` if its `stop` is none."""
        stop = training.get("stop")
        return cls(None if stop is None else EarlyStopConfig.model_validate(stop), lines)

    def add(self, line: Mapping[str, str | int]) -> None:
        """Note the line of the next round; a round in which the metric was not measured decides nothing."""
        if self._config is None:
            return
        self._column = judged_by(self._config.metric, line)
        if (text := line.get(self._column, "")) == "":
            return
        value, self._last = float(text), int(line["round"])
        if self._best_round == 0 or self._improves(value):
            self._best, self._best_round = value, self._last

    @property
    def met(self) -> bool:
        """Whether the run ends after the last line."""
        return self._config is not None and self._last - self._best_round >= self._config.patience

    @property
    def why(self) -> str:
        """The reason in words; "" unless it is met."""
        if self._config is None or not self.met:
            return ""
        by = f" by more than {self._config.min_delta:g}" if self._config.min_delta else ""
        waited = pluralize(self._last - self._best_round, "round")
        return f"{self._column} has not improved{by} on {self._best:g} of round {self._best_round} for {waited}"

    def _improves(self, value: float) -> bool:
        """Whether a value is better than the best so far; one that is not finite never is."""
        assert self._config is not None
        if not math.isfinite(value) or not math.isfinite(self._best):
            return math.isfinite(value)
        gain = Decimal(repr(value)) - Decimal(repr(self._best))  # exactly that of the decimals in metrics.csv
        return (-gain if lower_is_better(self._config.metric) else gain) > Decimal(repr(self._config.min_delta))
