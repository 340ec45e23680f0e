"""The measure by which the rounds of a run, and runs, are compared: its column of metrics.csv, direction and unit."""

import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pflmpi.text import format_decimal

_LOWER = ("loss", "error", "mae", "mse", "mape", "nll", "perplexity")  # ends of the names of measures, as of rmse
_SHARES = ("accuracy", "balanced_accuracy", "f1_macro")  # shown in percent
_NAME = re.compile("[a-z][a-z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class MainMeasure:
    """A measure that readers are shown first.

    Attributes:
        name: as in `evaluation.measures`, of one's own that of the function; `test_loss` where nothing is configured.
    """

    name: str

    @property
    def column(self) -> str:
        """Its column of metrics.csv, the mean over clients."""
        return self.name if self.name == "test_loss" else f"{self.name}_mean"

    @property
    def of_clients(self) -> str:
        """Its array [N] in the metrics of a checkpoint."""
        return "accuracy" if self.name == "accuracy" else f"client_{self.name}"

    @property
    def lower(self) -> bool:
        """Whether lower values are better."""
        return lower_is_better(self.name)

    @property
    def percent(self) -> bool:
        """Whether it is a share, shown in percent."""
        return self.name in _SHARES

    @property
    def scale(self) -> float:
        """What a value is multiplied by to be shown."""
        return 100.0 if self.percent else 1.0

    @property
    def words(self) -> str:
        """Its name for readers."""
        return self.name.replace("_", " ") if self.name in ("test_loss", *_SHARES) else self.name

    @property
    def axis(self) -> str:
        """Its name with its unit."""
        return f"{self.words} (%)" if self.percent else self.words

    def text(self, value: float) -> str:
        """A value for readers.

        >>> MainMeasure("accuracy").text(0.912), MainMeasure("rmse").text(0.912)
        ('91.20 %', '0.9120')
        >>> MainMeasure("rmse").text(0.00002)
        '2e-05'
        """
        return f"{100 * value:.2f} %" if self.percent else format_decimal(value, 4)


ACCURACY = MainMeasure("accuracy")


def main_measure(config: Mapping[str, Any], measured: Container[str]) -> MainMeasure:
    """The first of `evaluation.measures`, else accuracy where the labels are classes, else the test loss.

    Args:
        config: of the run, as plain values.
        measured: the columns of metrics.csv that have a value.

    >>> main_measure({"evaluation": {"measures": ["./mine.py:top_two", "auroc"]}}, ["top_two_mean", "test_loss"])
    MainMeasure(name='top_two')
    >>> main_measure({}, ["accuracy_mean", "test_loss"]), main_measure({}, ["test_loss"])
    (MainMeasure(name='accuracy'), MainMeasure(name='test_loss'))
    """
    section = config.get("evaluation")
    measures = section.get("measures") if isinstance(section, dict) else None
    measures = measures if isinstance(measures, list | tuple) else ()  # a stranger's run may have anything there
    first = [name for reference in measures[:1] if _NAME.fullmatch(name := str(reference).rpartition(":")[2])]
    candidates = [MainMeasure(name) for name in (*first, "accuracy", "test_loss")]
    return next((measure for measure in candidates if measure.column in measured), candidates[0])


@dataclass(frozen=True)
class MeasuredRounds:
    """The rounds of a run by its main measure; a line has the columns of metrics.csv that are numbers.

    Attributes:
        judge: the column by which the best round is chosen.
        last, best: lines of the last and the best round with a value; None without any.
    """

    measure: MainMeasure
    judge: str
    last: Mapping[str, float] | None
    best: Mapping[str, float] | None


def measured_rounds(config: Mapping[str, Any], lines: Iterable[Mapping[str, str | int]]) -> MeasuredRounds:
    """The main measure of a run, and its value in the last and the best round; of equally good ones in the first.

    Args:
        config: of the run, as plain values.
        lines: of metrics.csv.
    """
    lines = list(lines)
    rounds = [
        {name: number for name, text in line.items() if not math.isnan(number := _number(text))} for line in lines
    ]
    measure = main_measure(config, {name for line in rounds for name in line})
    judge = judged_by(measure.column, {name for line in lines for name in line})
    tested = [line for line in rounds if measure.column in line]
    best = (min if measure.lower else max)(
        (line for line in tested if judge in line), key=lambda line: line[judge], default=None
    )
    return MeasuredRounds(measure, judge, tested[-1] if tested else None, best)


def _number(text: str | int) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def lower_is_better(metric: str) -> bool:
    """Whether a measure, or its column of metrics.csv, is a loss or an error; of all others, higher ones are better.

    >>> lower_is_better("test_loss"), lower_is_better("rmse_mean"), lower_is_better("accuracy_mean")
    (True, True, False)
    """
    return re.sub("_(mean|weighted|bottom)$", "", metric).endswith(_LOWER)


def of_validation(measure: str) -> str:
    """What a measure of the test samples is called of the validation samples.

    >>> of_validation("accuracy_mean"), of_validation("test_loss")
    ('validation_accuracy_mean', 'validation_loss')
    """
    return f"validation_{measure.replace('test_loss', 'loss')}"


def judged_by(metric: str, columns: Container[str]) -> str:
    """The column of metrics.csv that rounds are chosen by: of validation samples where there are some.

    >>> columns = ["accuracy_mean", "validation_accuracy_mean", "validation_loss"]
    >>> judged_by("accuracy_mean", columns), judged_by("test_loss", columns), judged_by("train_loss", columns)
    ('validation_accuracy_mean', 'validation_loss', 'train_loss')
    """
    judge = of_validation(metric.removeprefix("unseen_").removeprefix("trained_"))
    return judge if judge in columns else metric
