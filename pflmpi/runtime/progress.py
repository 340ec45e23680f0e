"""Progress after a round on rank 0, for the checkpoint, the metrics file and the display."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from pflmpi.learning.main_measure import of_validation
from pflmpi.runtime.counts import Counts, figures, measure_columns
from pflmpi.store import metrics_file
from pflmpi.text import format_decimal

_ACCURACY = ("accuracy_mean", "accuracy_weighted", "accuracy_std")
_OTHERS = ("test_loss", "f1_macro", "accuracy_bottom")


@dataclass(frozen=True)
class Progress:
    """Metrics and cost of a round, on rank 0.

    Attributes:
        participants: [P] ascending ids of the clients that trained.
        skipped: ascending ids of those that failed, and count as absent.
        scores: None in rounds without an evaluation.
        seconds: `round`, from the end of the round before, or the start, to the end of this one; of the ranks that
            compute, `compute`, for which the slowest trained and tested, `waiting`, for which they waited for it on
            average, and `evaluation`, for which they tested on average; on rank 0 `exchange`, and `checkpoint`, for
            which training waited for the checkpoint before this round. The rest of one is written while training
            continues. Where they are configured, `simulated`, for which the slowest simulated client trained.
        bytes: logical `up`, `down` [N]; `wire_up`, `wire_down` [].
        memory: [R] the most bytes that each rank ever had; 0 where its system does not say.
        unseen: of the clients that were kept out of training; None if there are none.
        validation: as `scores`, of the validation samples; None if there are none.
        trained: [P] of the participants after local training; None where they are not tested then.
        train_loss: [P] float64, mean over the local steps of each participant; NaN of those without a step, and
            where an algorithm measures none.
        measures: names of what is measured besides (`evaluation.measures`).
    """

    round: int
    participants: np.ndarray
    skipped: np.ndarray
    scores: Counts | None
    seconds: dict[str, float]
    bytes: dict[str, np.ndarray] = field(default_factory=dict)
    memory: np.ndarray = field(default_factory=lambda: np.empty(0))
    unseen: Counts | None = None
    validation: Counts | None = None
    trained: Counts | None = None
    train_loss: np.ndarray = field(default_factory=lambda: np.empty(0))
    measures: Sequence[str] = ()

    @cached_property
    def columns(self) -> dict[str, str | int]:
        """The line of metrics.csv by column; accuracies are empty in a round without evaluation."""
        tested = _format_metrics(self.scores, (*_ACCURACY, *_OTHERS))
        line: list[str | int] = [
            self.round,
            len(self.participants),
            *tested[: len(_ACCURACY)],
            *(int(self.bytes[name].sum()) for name in ("up", "down", "wire_up", "wire_down")),
            *(f"{self.seconds[name]:.4f}" for name in ("round", "compute", "exchange", "evaluation", "checkpoint")),
            len(self.skipped),
            *_format_metrics(self.unseen, _ACCURACY),
            _format_mean(self.train_loss),
            *tested[len(_ACCURACY) :],
            *_format_metrics(self.trained, (*_ACCURACY, "test_loss")),
            f"{self.seconds['waiting']:.4f}",
            int(self.memory.max(initial=0)),
            int(self.memory.sum()),
        ]
        columns = dict(zip(metrics_file.COLUMNS, line, strict=True))
        if "simulated" in self.seconds:
            columns["simulated_seconds"] = f"{self.seconds['simulated']:.4f}"
        for name in self.measures:
            columns |= zip(measure_columns(name), _format_metrics(self.scores, measure_columns(name)), strict=True)
        for prefix, scores in (("unseen_", self.unseen), ("trained_", self.trained)):
            means = [measure_columns(name)[0] for name in self.measures]
            columns |= zip([prefix + name for name in means], _format_metrics(scores, means), strict=True)
        if self.validation is not None:
            names = [*_ACCURACY, *_OTHERS, *chain.from_iterable(map(measure_columns, self.measures))]
            values = _format_metrics(None if self.scores is None else self.validation, names)
            columns |= zip(map(of_validation, names), values, strict=True)
        return columns

    def arrays(self) -> dict[str, np.ndarray]:
        """The metrics of the round as a checkpoint stores them."""
        arrays = {"participants": self.participants, "skipped": self.skipped, "client_train_loss": self.train_loss}
        arrays.update({f"seconds_{name}": np.array(value) for name, value in self.seconds.items()})
        validation = self.validation if self.scores else None
        for prefix, scores in {
            "": self.scores,
            "unseen_": self.unseen,
            "trained_": self.trained,
            "validation_": validation,
        }.items():
            if scores is not None:
                by_client = {
                    "correct": scores.correct,
                    "total": scores.samples,
                    "accuracy": scores.accuracy,
                    "client_test_loss": scores.mean_loss,
                    "client_f1": scores.macro_f1,
                    "hits": scores.hits.astype(np.int32),
                    "predicted": scores.predicted.astype(np.int32),
                    "class_accuracy": scores.class_accuracy,
                }
                if not scores.by_class:  # none of which has a meaning
                    by_client = {name: by_client[name] for name in ("total", "client_test_loss")}
                by_client |= {f"client_{name}": values for name, values in scores.values.items()}
                if "client_accuracy" in by_client:
                    by_client["accuracy"] = by_client.pop("client_accuracy")
                over_all = {name: np.array(value) for name, value in figures(scores).items()}
                for name, value in (by_client | over_all).items():
                    arrays[f"{prefix}{name}" if prefix != "validation_" else of_validation(name)] = value
        return arrays


def metric_columns(measures: Sequence[str], simulated: bool, validates: bool = False) -> list[str]:
    """The columns of metrics.csv of a run with these measures, and with `simulated` seconds of its clients."""
    nothing = np.empty(0, np.int64)
    empty = dict.fromkeys(
        ("round", "compute", "exchange", "evaluation", "checkpoint", "waiting", *["simulated"] * simulated), 0.0
    )
    sent = dict.fromkeys(("up", "down", "wire_up", "wire_down"), nothing)
    validation = Counts.none(np.empty((0, 1), np.int64)) if validates else None
    progress = Progress(0, nothing, nothing, None, empty, sent, validation=validation, measures=measures)
    return [*progress.columns]


def _format_metrics(scores: Counts | None, names: Sequence[str]) -> list[str]:
    if scores is None:
        return [""] * len(names)
    values = figures(scores)
    return [format_decimal(values[name], 6) if name in values else "" for name in names]


def _format_mean(losses: np.ndarray) -> str:
    losses = losses[~np.isnan(losses)]
    return format_decimal(float(losses.mean()), 6) if len(losses) else ""


Observer = Callable[[Progress], None]
