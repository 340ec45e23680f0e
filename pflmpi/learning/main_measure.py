"""The main measure, by which rounds and runs are compared: its column of metrics.csv, direction and unit."""

import math
import re
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pflmpi.text import format_decimal

_LOWER_IS_BETTER = ("loss", "error", "mae", "mse", "mape", "nll", "perplexity")  # suffixes of measures, such as rmse
_PERCENT = ("accuracy", "balanced_accuracy", "f1_macro")
MEASURE_NAME = re.compile("[a-z][a-z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class MainMeasure:
    """The measure that users see first."""

    name: str  # as in `evaluation.measures`, that of the function for a user's own; or `test_loss`

    @property
    def column(self) -> str:
        """Its column of metrics.csv: the mean over clients."""
        return self.name if self.name == "test_loss" else f"{self.name}_mean"

    @property
    def of_clients(self) -> str:
        """Name of its array [N] in the metrics of a checkpoint."""
        return "accuracy" if self.name == "accuracy" else f"client_{self.name}"

    @property
    def lower(self) -> bool:
        """Whether lower values are better."""
        return lower_is_better(self.name)

    @property
    def percent(self) -> bool:
        """Whether it is a share, shown in percent."""
        return self.name in _PERCENT

    @property
    def scale(self) -> float:
        """The factor on displayed values."""
        return 100.0 if self.percent else 1.0

    @property
    def words(self) -> str:
        """Its displayed name."""
        return self.name.replace("_", " ") if self.name in ("test_loss", *_PERCENT) else self.name

    @property
    def axis(self) -> str:
        """Its displayed name with unit."""
        return f"{self.words} (%)" if self.percent else self.words

    def text(self, value: float) -> str:
        """A displayed value.

        >>> MainMeasure("accuracy").text(0.912), MainMeasure("rmse").text(0.912)
        ('91.20 %', '0.9120')
        >>> MainMeasure("rmse").text(0.00002)
        '2e-05'
        """
        return f"{100 * value:.2f} %" if self.percent else format_decimal(value, 4)


ACCURACY = MainMeasure("accuracy")


def main_measure(config: Mapping[str, Any], measured: Container[str]) -> MainMeasure:
    """The first of a run's `evaluation.measures`, else accuracy if it was measured, else the test loss.

    `measured` are the columns of metrics.csv that have values.

    >>> main_measure({"evaluation": {"measures": ["./mine.py:top_two", "auroc"]}}, ["top_two_mean", "test_loss"])
    MainMeasure(name='top_two')
    >>> main_measure({}, ["accuracy_mean", "test_loss"]), main_measure({}, ["test_loss"])
    (MainMeasure(name='accuracy'), MainMeasure(name='test_loss'))
    """
    section = config.get("evaluation")
    measures = section.get("measures") if isinstance(section, dict) else None
    names = ["accuracy", "test_loss"]
    if isinstance(measures, list | tuple) and measures:  # unverified: the run may come from anyone
        first = str(measures[0]).rpartition(":")[2]
        names = [first, *names] if MEASURE_NAME.fullmatch(first) else names
    candidates = [MainMeasure(name) for name in names]
    return next((measure for measure in candidates if measure.column in measured), candidates[0])


@dataclass(frozen=True)
class MeasuredRounds:
    """The last and the best round of a run by its main measure.

    Attributes:
        judge: the column by which the best round is chosen.
        last, best: the numeric columns of these rounds in metrics.csv; None if no round has a value.
    """

    measure: MainMeasure
    judge: str
    last: Mapping[str, float] | None
    best: Mapping[str, float] | None


def summarize_rounds(config: Mapping[str, Any], lines: Iterable[Mapping[str, str | int]]) -> MeasuredRounds:
    """The main measure, the last round with a value and the best one, the first of equally good, by metrics.csv."""
    lines = list(lines)
    rounds = [_select_numbers(line) for line in lines]
    measure = main_measure(config, {name for round in rounds for name in round})
    judge = choose_judging_column(measure.column, {name for line in lines for name in line})
    tested = [round for round in rounds if measure.column in round]
    candidates = [round for round in tested if judge in round]
    best = (min if measure.lower else max)(candidates, key=lambda round: round[judge], default=None)
    return MeasuredRounds(measure, judge, tested[-1] if tested else None, best)


def _select_numbers(line: Mapping[str, str | int]) -> dict[str, float]:
    """The columns of a line with a number other than NaN."""
    numbers = {}
    for name, text in line.items():
        with suppress(ValueError):
            numbers[name] = float(text)
    return {name: number for name, number in numbers.items() if not math.isnan(number)}


def lower_is_better(metric: str) -> bool:
    """Whether lower values of a measure, or of its column of metrics.csv, are better, as of losses and errors.

    >>> lower_is_better("test_loss"), lower_is_better("rmse_mean"), lower_is_better("accuracy_mean")
    (True, True, False)
    """
    return re.sub("_(mean|weighted|bottom)$", "", metric).endswith(_LOWER_IS_BETTER)


def to_validation_name(measure: str) -> str:
    """The name of a measure's validation counterpart.

    >>> to_validation_name("accuracy_mean"), to_validation_name("test_loss")
    ('validation_accuracy_mean', 'validation_loss')
    """
    return f"validation_{measure.replace('test_loss', 'loss')}"


def choose_judging_column(metric: str, columns: Container[str]) -> str:
    """The column of metrics.csv by which rounds are chosen: of validation samples if there are any.

    >>> columns = ["accuracy_mean", "validation_accuracy_mean", "validation_loss"]
    >>> tuple(choose_judging_column(metric, columns) for metric in ("accuracy_mean", "test_loss", "train_loss"))
    ('validation_accuracy_mean', 'validation_loss', 'train_loss')
    """
    judge = to_validation_name(metric.removeprefix("unseen_").removeprefix("trained_"))
    return judge if judge in columns else metric
