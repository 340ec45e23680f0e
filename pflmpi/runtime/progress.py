"""Metrics of a round on rank 0, for the checkpoint, metrics.csv and the display."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from pflmpi.learning.main_measure import to_validation_name
from pflmpi.runtime.counts import Counts, compute_metrics, measure_columns
from pflmpi.store import metrics_file
from pflmpi.text import format_decimal

_ACCURACY = ("accuracy_mean", "accuracy_weighted", "accuracy_std")
_OTHERS = ("test_loss", "f1_macro", "accuracy_bottom")


@dataclass(frozen=True)
class Progress:
    """Metrics and cost of a round, on rank 0.

    Attributes:
        participants: [P] ascending ids of the clients that trained.
        skipped: ascending ids of the participants that failed, which count as absent.
        scores: newest test results of all clients; None in rounds without an evaluation.
        seconds: by name,
            `round`: from the end of the previous round, or the start;
            `compute`: training and testing on the slowest rank;
            `waiting`: for the slowest rank, mean over the ranks that compute;
            `evaluation`: testing, mean over the ranks that compute;
            `exchange`: of messages, on rank 0;
            `checkpoint`: for which training waited for the last checkpoint, on rank 0;
            `simulated`: training of the slowest simulated client, if that is configured.
        bytes: logical `up`, `down` [N]; `wire_up`, `wire_down` [].
        memory: [R] peak memory of each rank in bytes; 0 where the system does not say.
        unseen: results of the clients that were kept out of training; None if there are none.
        validation: as `scores`, on validation samples; None if there are none.
        trained: [P] results of the participants after local training; None if they were not tested then.
        train_loss: [P] float64, mean over a participant's local steps; NaN without steps, or if it is not measured.
        measures: names of `evaluation.measures`.
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
        """The line of metrics.csv by column; test results are "" in a round without evaluation."""
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
            columns |= zip(map(to_validation_name, names), values, strict=True)
        return columns

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the round's metrics in a checkpoint."""
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
                if not scores.by_class:  # the others are undefined
                    by_client = {name: by_client[name] for name in ("total", "client_test_loss")}
                by_client |= {f"client_{name}": values for name, values in scores.values.items()}
                if "client_accuracy" in by_client:
                    by_client["accuracy"] = by_client.pop("client_accuracy")
                over_all = {name: np.array(value) for name, value in compute_metrics(scores).items()}
                for name, value in (by_client | over_all).items():
                    arrays[f"{prefix}{name}" if prefix != "validation_" else to_validation_name(name)] = value
        return arrays


def metric_columns(measures: Sequence[str], simulated: bool, validates: bool = False) -> list[str]:
    """Returns the columns of metrics.csv.

    Args:
        measures: names of `evaluation.measures`.
        simulated: whether the clients' speed is simulated.
        validates: whether there are validation samples.
    """
    no_clients = np.empty(0, np.int64)
    seconds = dict.fromkeys(
        ("round", "compute", "exchange", "evaluation", "checkpoint", "waiting", *["simulated"] * simulated), 0.0
    )
    num_bytes = dict.fromkeys(("up", "down", "wire_up", "wire_down"), no_clients)
    validation = Counts.none(np.empty((0, 1), np.int64)) if validates else None
    progress = Progress(0, no_clients, no_clients, None, seconds, num_bytes, validation=validation, measures=measures)
    return [*progress.columns]


def _format_metrics(scores: Counts | None, names: Sequence[str]) -> list[str]:
    if scores is None:
        return [""] * len(names)
    values = compute_metrics(scores)
    return [format_decimal(values[name], 6) if name in values else "" for name in names]


def _format_mean(losses: np.ndarray) -> str:
    losses = losses[~np.isnan(losses)]
    return format_decimal(float(losses.mean()), 6) if len(losses) else ""


Observer = Callable[[Progress], None]
