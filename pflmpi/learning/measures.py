"""Measures of scores against labels (`evaluation.measures`), by name or as a user's function.

    f(scores [n, K] float64, the model's outputs, labels [n] or [n, K]) -> a number, NaN where it is undefined

It is called once per client with all its test samples; for tokens, n is the number of labelled positions.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from pflmpi import outside
from pflmpi.errors import ConfigError, RunError
from pflmpi.learning.main_measure import MEASURE_NAME
from pflmpi.registry import Registry, accept_function
from pflmpi.text import short_repr

Measure = Callable[[np.ndarray, np.ndarray], float]
_NUM_BINS = 15  # of the confidence
_RESERVED = (  # names of other arrays and columns in checkpoints and tables
    *("f1", "test_loss", "train_loss", "run", "round", "client", "participant", "train_samples", "test_samples"),
    *("validation_samples", "up_bytes", "down_bytes", "round_seconds", "correct", "total", "loss", "samples"),
)
_PREFIXES, _SUFFIXES = ("client_", "unseen_", "trained_", "validation_"), ("_mean", "_weighted", "_bottom")


def accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of the samples, or of several labels, that are right."""
    return float((_predict_classes(scores, labels) == labels).mean())


def balanced_accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    """Mean of the accuracy in each class that is there."""
    predicted = _predict_classes(scores, labels)
    return float(np.mean([(predicted[labels == label] == label).mean() for label in np.unique(labels)]))


def f1_macro(scores: np.ndarray, labels: np.ndarray) -> float:
    """Plain mean of F1 over the classes that are there or predicted."""
    truth, predicted = (_one_hot(values, scores.shape[1]) for values in (labels, _predict_classes(scores, labels)))
    sizes = truth.sum(0) + predicted.sum(0)
    return _nanmean(2 * (truth & predicted).sum(0)[sizes > 0] / sizes[sizes > 0])


def auroc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve, of each class against the rest.

    It is the mean over the classes with samples of both kinds.
    """
    probabilities = np.exp(_log_softmax(scores)) if labels.ndim == 1 else scores
    pairs = zip(probabilities.T, _one_hot(labels, scores.shape[1]).T, strict=True)
    return _nanmean([_area_under_curve(of_class, positive) for of_class, positive in pairs])


def perplexity(scores: np.ndarray, labels: np.ndarray) -> float:
    """exp of the mean cross-entropy; lower is better."""
    return float(np.exp(-_log_softmax(scores)[np.arange(len(labels)), labels].mean()))


def calibration_error(scores: np.ndarray, labels: np.ndarray) -> float:
    """Expected calibration error, in 15 bins; lower is better.

    The mean of |accuracy - confidence| over the bins of the confidence.
    """
    confidence = np.exp(_log_softmax(scores).max(1))
    gaps = (scores.argmax(1) == labels) - confidence
    bins = np.minimum((confidence * _NUM_BINS).astype(int), _NUM_BINS - 1)
    return float(np.abs(np.bincount(bins, gaps, _NUM_BINS)).sum() / len(labels))


def mae(scores: np.ndarray, labels: np.ndarray) -> float:
    """Mean absolute error; lower is better."""
    return float(np.abs(scores - labels).mean())


def rmse(scores: np.ndarray, labels: np.ndarray) -> float:
    """Root of the mean squared error; lower is better."""
    return float(np.sqrt(np.square(scores - labels).mean()))


def r2(scores: np.ndarray, labels: np.ndarray) -> float:
    """Explained share of the variance, mean over outputs that vary."""
    spread = np.square(labels - labels.mean(0)).sum(0)
    error = np.square(labels - scores).sum(0)
    return _nanmean(1 - error[spread > 0] / spread[spread > 0])


MEASURES: Registry[Measure] = Registry(
    "measure",
    {
        measure.__name__: measure
        for measure in (accuracy, balanced_accuracy, f1_macro, auroc, perplexity, calibration_error, mae, rmse, r2)
    },
    accept=accept_function("scores", "labels", returns="a number"),
)


def load_measures(names: Sequence[str]) -> dict[str, Measure]:
    """Measures by column name, which for a user's function is its own name."""
    measures: dict[str, Measure] = {}
    for reference in names:
        measure, name = MEASURES[reference], reference.rpartition(":")[2]
        is_users = MEASURES.reference(reference) is not None
        reserved = name in {*MEASURES, *_RESERVED} or name.startswith(_PREFIXES) or name.endswith(_SUFFIXES)
        if name in measures or (is_users and reserved) or not MEASURE_NAME.fullmatch(name):
            raise ConfigError(
                f"evaluation.measures: {short_repr(reference)} would have the columns {name}_mean, ...; give each "
                "measure a name of its own, of lower-case letters, digits and underscores, that is no other column's "
                f"and does not begin with {', '.join(_PREFIXES)} or end with {', '.join(_SUFFIXES)}"
            )
        measures[name] = measure
    return measures


def compute_measures(measures: Mapping[str, Measure], scores: np.ndarray, labels: np.ndarray) -> list[float]:
    """The value of each measure over a client's test samples; NaN if it has none.

    Raises:
        RunError: a user's function raises, or does not return a number.
    """
    if not len(labels):
        return [np.nan] * len(measures)
    values = []
    for name, measure in measures.items():
        try:
            values.append(float(measure(scores.copy(), labels.copy())))
        except Exception as error:
            kinds = f"scores {list(scores.shape)} and labels {labels.dtype} {list(labels.shape)}"
            says = outside.describe_cause(error) or f"{type(error).__name__}: {error}"
            raise RunError(f"measure {name} has no value for {kinds}: {says}; mend it, or leave it out") from error
    return values


def _predict_classes(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The class of the highest score [n]; for several labels, whether each score is positive [n, K]."""
    return scores.argmax(1) if labels.ndim == 1 else scores > 0


def _one_hot(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """[n, K] bool."""
    return labels[:, None] == np.arange(num_classes) if labels.ndim == 1 else labels > 0


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def _area_under_curve(scores: np.ndarray, positive: np.ndarray) -> float:
    """Share of the pairs of a positive and a negative sample that are in order, ties as half; NaN without pairs."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[inverse]
    num_positive = int(positive.sum())
    num_pairs = num_positive * (len(scores) - num_positive)
    if not num_pairs:
        return np.nan
    return (float(ranks[positive].sum()) - num_positive * (num_positive + 1) / 2) / num_pairs


def _nanmean(values: ArrayLike) -> float:
    """The mean of the values that are not NaN; NaN, without numpy's warning, if there are none."""
    array = np.asarray(values, np.float64)
    array = array[~np.isnan(array)]
    return float(array.mean()) if len(array) else np.nan
