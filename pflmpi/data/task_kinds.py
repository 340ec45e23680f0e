"""What is predicted (`data.task`): the labels of the samples, the loss of scores, and the measures that make sense.

class Ranking(TaskKind):                            data: {task: ./mine.py:Ranking}
    def loss(self, scores, y):                      scores [B, K], y [B, ...] -> [B], the loss of each sample
        ...
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pflmpi.data.numbers import to_float32
from pflmpi.registry import Registry, accept_subclass

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # in place of a token's label: the position is padding, as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class TaskKind(ABC):
    """The contract of a kind of task; its methods are pure.

    Attributes:
        summary: one line for `pflmpi list`.
        classes: whether each sample has one label, its class. Only then do partitions divide by labels, and algorithms
            send what belongs to classes.
        default_measures: what `evaluation.measures` is where nothing is configured.
        measures: the names in `pflmpi.learning.measures` that make sense.
    """

    summary: ClassVar[str]
    classes: ClassVar[bool] = False
    default_measures: ClassVar[tuple[str, ...]] = ()
    measures: ClassVar[tuple[str, ...]] = ()

    @property
    def cross_entropy(self) -> bool:
        """Whether the loss is the plain cross-entropy of classes."""
        return self.classes and type(self).loss is Classification.loss

    def labels(self, y: np.ndarray) -> np.ndarray:
        """The labels [n, ...] as they are kept: by default numbers, float32 [n, K].

        Raises:
            ValueError: they are no numbers, or float32 cannot hold or tell apart their values.
        """
        if y.dtype.kind not in "biuf" or y.ndim not in (1, 2):
            raise ValueError(f"labels are {y.dtype} {list(y.shape)}; expected numbers [n] or [n, K]")
        return to_float32(y[:, None] if y.ndim == 1 else y, "label")

    def num_outputs(self, labels: np.ndarray) -> int:
        """K, the scores of a sample or position."""
        return int(labels.shape[-1])

    def reorder(self, labels: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        """The labels [n, ...] after output k becomes output `outputs[k]` [K]; by default they are numbers [n, K]."""
        reordered = labels.copy()
        reordered[:, outputs] = labels
        return reordered

    def score_axes(self, label_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Axes of the scores between samples and outputs, for labels of this shape: by default none, [B, K]."""
        return ()

    @abstractmethod
    def loss(self, scores: "Tensor", y: "Tensor") -> "Tensor":
        """[B], the loss of each sample, summed over what `weights` counts."""

    def weights(self, y: "Tensor") -> "Tensor | None":
        """[B] float, what each sample counts in the mean of a batch; None: all the same."""
        return None

    def scored(self, scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a measure gets, of scores [n, ...] and labels [n, ...]."""
        return scores, labels


class Classification(TaskKind):
    """One class for each sample, cross-entropy."""

    summary = "one class for each sample, cross-entropy"
    classes = True
    measures = ("accuracy", "balanced_accuracy", "f1_macro", "auroc", "perplexity", "calibration_error")

    def loss(self, scores: "Tensor", y: "Tensor") -> "Tensor":
        from torch.nn.functional import cross_entropy

        return cross_entropy(scores, y, reduction="none")


class Multilabel(TaskKind):
    """Several yes or no for each sample, labels [n, K] of 0 and 1: binary cross-entropy of logits, mean over labels."""

    summary = "K times yes or no for each sample, binary cross-entropy"
    default_measures = ("accuracy", "f1_macro", "auroc")
    measures = default_measures

    def labels(self, y: np.ndarray) -> np.ndarray:
        values = super().labels(y)
        if (wrong := ~np.isin(values, (0, 1)).all(1)).any():
            raise ValueError(f"sample {wrong.argmax()} has the label {y[wrong.argmax()]}; allowed: 0 and 1")
        return values

    def loss(self, scores: "Tensor", y: "Tensor") -> "Tensor":
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(scores, y, reduction="none").mean(-1)


class Regression(TaskKind):
    """Numbers, labels [n] or [n, K]: squared error, mean over the outputs."""

    summary = "one number or several for each sample, mean squared error"
    default_measures = ("rmse", "mae", "r2")
    measures = default_measures

    def loss(self, scores: "Tensor", y: "Tensor") -> "Tensor":
        return (scores - y).square().mean(-1)


class Tokens(TaskKind):
    """A class for each position, labels [n, T, ...] with -100 for padding: cross-entropy, mean over positions."""

    summary = "a class for each position; -100 is padding"
    default_measures = ("accuracy", "perplexity")
    measures = Classification.measures

    def labels(self, y: np.ndarray) -> np.ndarray:
        if y.dtype.kind not in "iu" or y.ndim < 2:
            raise ValueError(f"labels are {y.dtype} {list(y.shape)}; expected whole numbers [n, T]")
        if (wrong := ((y < 0) & (y != IGNORED)).reshape(len(y), -1).any(1)).any():
            raise ValueError(
                f"sample {wrong.argmax()} has a label below 0; allowed: classes, and {IGNORED} for padding"
            )
        return y.astype(np.int64)

    def num_outputs(self, labels: np.ndarray) -> int:
        return int(labels.max(initial=0)) + 1

    def reorder(self, labels: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        return np.where(labels == IGNORED, IGNORED, outputs[np.maximum(labels, 0)])

    def score_axes(self, label_shape: tuple[int, ...]) -> tuple[int, ...]:
        return label_shape

    def loss(self, scores: "Tensor", y: "Tensor") -> "Tensor":
        # Gathered, since on a GPU `nll_loss` of some shapes has no deterministic kernel.
        likely = scores.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(likely * (y != IGNORED)).flatten(1).sum(1)

    def weights(self, y: "Tensor") -> "Tensor":
        return (y != IGNORED).flatten(1).sum(1).float()

    def scored(self, scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return scores[labels != IGNORED], labels[labels != IGNORED]


CLASSIFICATION = Classification()
TASK_KINDS: Registry[type[TaskKind]] = Registry(
    "task",
    {"classification": Classification, "multilabel": Multilabel, "regression": Regression, "tokens": Tokens},
    accept=accept_subclass(TaskKind, "summary"),
)
