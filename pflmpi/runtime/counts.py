"""Test results of personal models: counts by client and class, and all metrics that follow from them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from pflmpi import outside
from pflmpi.algorithms.base import Algorithm
from pflmpi.data.federation import Federation
from pflmpi.data.task_kinds import TaskKind
from pflmpi.learning.client import Batch
from pflmpi.learning.main_measure import lower_is_better
from pflmpi.learning.measures import Measure, compute_measures
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.runtime.contract import check_scores
from pflmpi.tree import Tree

LOWEST_SHARE = 0.1  # share of the clients whose mean is `accuracy_bottom`


@dataclass(frozen=True, eq=False)
class Counts:
    """Test results of clients, one row each.

    Attributes:
        hits: [N, K] int64, correctly classified samples of each class; [N, 0] if labels are not classes.
        predicted: [N, K] int64, samples classified as each class, without those that have a NaN score; as `hits`.
        total: [N, K] int64, samples of each class; [N, 1] if labels are not classes.
        loss: [N] float64, the task's loss summed over samples, such as cross-entropy; inf if it is not finite, NaN
            for a client none of whose samples counts.
        values: by name, [N] float64, the measures of `evaluation.measures`; NaN if undefined for a client, and the
            worst infinity if a score is NaN.
    """

    hits: np.ndarray
    predicted: np.ndarray
    total: np.ndarray
    loss: np.ndarray
    values: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def none(cls, total: np.ndarray, measures: Iterable[str] = (), classes: bool = True) -> "Counts":
        """Empty counts, with `total` [N, K] samples."""
        values = {name: np.full(len(total), np.nan) for name in measures}
        hits = np.zeros_like(total if classes else total[:, :0])
        return cls(hits, hits.copy(), total, np.zeros(len(total)), values)

    def rows(self, index: np.ndarray | slice) -> "Counts":
        """The rows at the given positions, mask or slice."""
        values = {name: values[index] for name, values in self.values.items()}
        return Counts(self.hits[index], self.predicted[index], self.total[index], self.loss[index], values)

    def updated(self, clients: np.ndarray, new: "Counts") -> "Counts":
        """A copy in which the rows of `clients` are those of `new`."""
        values = {name: values.copy() for name, values in self.values.items()}
        copies = Counts(self.hits.copy(), self.predicted.copy(), self.total, self.loss.copy(), values)
        copies.hits[clients], copies.predicted[clients], copies.loss[clients] = new.hits, new.predicted, new.loss
        for name, column in values.items():
            column[clients] = new.values[name]
        return copies

    @property
    def by_class(self) -> bool:
        return bool(self.hits.shape[1])

    @property
    def samples(self) -> np.ndarray:
        """[N] int64, samples of each client."""
        return np.asarray(self.total.sum(1))

    @property
    def correct(self) -> np.ndarray:
        """[N] int64, correctly classified samples of each client."""
        return np.asarray(self.hits.sum(1))

    @property
    def accuracy(self) -> np.ndarray:
        """[N] float64, in 0..1; NaN for a client without samples, and where accuracy is not measured."""
        if not self.by_class:
            return self.values.get("accuracy", np.full(len(self.loss), np.nan))
        return divide_or_nan(self.correct, self.samples)

    @property
    def mean(self) -> float:
        """Mean of accuracy over clients."""
        return _over_clients(np.mean, self.accuracy)

    @property
    def mean_loss(self) -> np.ndarray:
        """[N] float64, the task's loss per sample; NaN for a client without samples, else as in `loss`."""
        return divide_or_nan(self.loss, self.samples)

    @property
    def macro_f1(self) -> np.ndarray:
        """[N] float64, mean F1 over the classes that a client has or predicts; NaN without samples."""
        f1 = divide_or_nan(2 * self.hits, self.total + self.predicted)  # [N, K]
        counted = ~np.isnan(f1)
        return divide_or_nan(np.where(counted, f1, 0).sum(1), counted.sum(1))

    @property
    def class_accuracy(self) -> np.ndarray:
        """[K] float64, accuracy on the samples of each class, over all clients; NaN without samples."""
        return divide_or_nan(self.hits.sum(0), self.total.sum(0))


def concatenate(parts: Sequence[Counts]) -> Counts:
    names = ("hits", "predicted", "total", "loss")
    values = {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values}
    hits, predicted, total, loss = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    return Counts(hits, predicted, total, loss, values)


def sort_by_client(groups: Sequence[np.ndarray], counts: Sequence[Counts], none: Counts) -> Counts:
    """Returns the counts of all groups in ascending order of client ids.

    Args:
        groups: client ids of each group.
        counts: counts of each group, in the order of its ids.
        none: returned if there are no groups.
    """
    if not groups:
        return none
    return concatenate(counts).rows(np.argsort(np.concatenate(groups), kind="stable"))


def compute_metrics(counts: Counts) -> dict[str, float]:
    """Returns metrics over all clients by name, each over the clients that have a value; NaN if none has.

    >>> none = np.zeros((1, 2), np.int64)
    >>> compute_metrics(Counts(none, none, none, np.zeros(1)))["accuracy_mean"]
    nan
    """
    accuracy = counts.accuracy
    if not counts.by_class:
        metrics = {"test_loss": _over_clients(np.mean, counts.mean_loss)}
        if "accuracy" in counts.values:
            metrics["accuracy_std"] = _over_clients(np.std, accuracy)
        if "f1_macro" in counts.values:
            metrics["f1_macro"] = _over_clients(np.mean, counts.values["f1_macro"])
        return metrics | _summarise_measures(counts)
    metrics = {
        "accuracy_mean": counts.mean,
        "accuracy_weighted": float(divide_or_nan(counts.correct.sum(), counts.samples.sum())),
        "accuracy_std": _over_clients(np.std, accuracy),
        "accuracy_bottom": _over_clients(mean_of_lowest, accuracy),
        "f1_macro": _over_clients(np.mean, counts.macro_f1),
        "test_loss": _over_clients(np.mean, counts.mean_loss),
    }
    return metrics | _summarise_measures(counts)


def _summarise_measures(counts: Counts) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, values in counts.values.items():
        metrics |= zip(measure_columns(name), _summarise_measure(name, values, counts.samples), strict=True)
    return metrics


def measure_columns(measure: str) -> tuple[str, str, str]:
    """Returns the columns of a measure: mean over clients, mean weighted by samples, mean of the worst tenth."""
    return f"{measure}_mean", f"{measure}_weighted", f"{measure}_bottom"


def _summarise_measure(measure: str, values: np.ndarray, samples: np.ndarray) -> tuple[float, float, float]:
    """Returns the values of `measure_columns` over the clients whose value [N] is not NaN.

    With infinities of both signs, which have no mean, these are the worse one.
    """
    is_defined, sign = ~np.isnan(values), -1 if lower_is_better(measure) else 1
    if -sign * np.inf in values:
        values = np.where(np.isinf(values), -sign * np.inf, values)
    weighted = divide_or_nan((values[is_defined] * samples[is_defined]).sum(), samples[is_defined].sum())
    return _over_clients(np.mean, values), float(weighted), sign * _over_clients(mean_of_lowest, sign * values)


def mean_of_lowest(values: np.ndarray) -> float:
    """Returns the mean of the lowest tenth of values, of at least one.

    >>> mean_of_lowest(np.arange(25.0))
    0.5
    """
    return float(np.mean(np.sort(values)[: max(1, int(LOWEST_SHARE * len(values)))]))


def _over_clients(reduce: Callable[[np.ndarray], float], values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    with np.errstate(invalid="ignore"):  # the deviation of infinite values
        return float(reduce(values)) if len(values) else float("nan")


def divide_or_nan(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole; NaN where whole is 0."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan)


def predict_batches(
    algorithm: Algorithm, task: Task, state: Tree, received: Messages, batches: Iterable[Batch]
) -> list[Tensor]:
    """Returns the scores [B, K] of each batch."""
    scores = []
    with torch.no_grad():
        for batch in batches:
            scores.append(algorithm.predict(task, state, received, batch.x))
            check_scores(algorithm, scores[-1], len(batch.x), task.score_shape)
    return scores


def count_results(
    federation: Federation, clients: np.ndarray, scores: Tensor, measures: Mapping[str, Measure] | None = None
) -> Counts:
    """Returns the test results of each client from the scores of its samples.

    Args:
        clients: [m] ids.
        scores: [n, K] logits on the host, of the test samples in stored order, client by client.
        measures: further measures by name.
    """
    tests, num_classes = [federation.test[client] for client in clients], federation.dataset.num_classes
    labels, sizes = federation.dataset.labels[np.concatenate(tests)], federation.num_test[clients]
    task_kind = federation.dataset.task_kind
    values = _compute_measures(measures or {}, task_kind, scores, labels, sizes)
    if not task_kind.classes:
        untested = Counts.none(sizes[:, None], classes=False)
        return replace(untested, loss=_sum_losses(task_kind, scores, labels, sizes), values=values)
    rows = np.repeat(np.arange(len(clients)), sizes)
    predicted, is_valid = scores.argmax(1).numpy(), ~scores.isnan().any(1).numpy()
    is_hit = is_valid & (predicted == labels)

    def count_classes(rows: np.ndarray, classes: np.ndarray) -> np.ndarray:
        class_counts = np.bincount(rows * num_classes + classes, minlength=len(clients) * num_classes)
        return class_counts.reshape(len(clients), num_classes)

    return Counts(
        hits=count_classes(rows[is_hit], labels[is_hit]),
        predicted=count_classes(rows[is_valid], predicted[is_valid]),
        total=count_classes(rows, labels),
        loss=_sum_losses(task_kind, scores, labels, sizes),
        values=values,
    )


def _sum_losses(task_kind: TaskKind, scores: Tensor, labels: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns [m] the summed loss of each client; inf if it is not finite, NaN if none of its samples counts.

    Args:
        sizes: [m] samples of each client.
    """
    y = torch.from_numpy(labels)
    if task_kind.cross_entropy:
        totals = -_sum_per_client(scores.double().log_softmax(1).numpy()[np.arange(len(labels)), labels], sizes)
    else:
        totals = _sum_per_client(_compute_losses(task_kind, scores, y, sizes), sizes)
    totals = np.where(np.isfinite(totals), totals, np.inf)
    if task_kind.cross_entropy or (weights := task_kind.weights(y)) is None:
        return totals
    weighted: np.ndarray = divide_or_nan(totals, _sum_per_client(weights.double().numpy(), sizes)) * sizes
    return weighted


def _compute_losses(task_kind: TaskKind, scores: Tensor, y: Tensor, sizes: np.ndarray) -> np.ndarray:
    """Returns [n] the loss of each sample, of clients with so many (`sizes` [m])."""
    if not outside.is_from_outside(type(task_kind)):
        return task_kind.loss(scores.double(), y.double() if y.is_floating_point() else y).numpy()
    # In float32, as in training: a task may hold tensors of its own. Client by client, so that no other has a part.
    parts = zip(*(torch.split(values, sizes.tolist()) for values in (scores, y)), strict=True)
    return torch.cat([torch.empty(0), *(task_kind.loss(*part) for part in parts if len(part[0]))]).double().numpy()


def _sum_per_client(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns [m] the sum of each client's values, with the bits that it has when the client is alone."""
    sums, starts = np.zeros(len(sizes)), np.cumsum(sizes) - sizes
    for size in np.unique(sizes):
        clients = np.flatnonzero(sizes == size)
        sums[clients] = values[starts[clients, None] + np.arange(size)].sum(1)
    return sums


def _compute_measures(
    measures: Mapping[str, Measure], task_kind: TaskKind, scores: Tensor, labels: np.ndarray, sizes: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns each measure's values [m] by name, from the samples [n] of clients with so many (`sizes` [m])."""
    if not measures:
        return {}
    cuts = np.cumsum(sizes)[:-1]
    pairs = zip(np.split(scores.double().numpy(), cuts), np.split(labels, cuts), strict=True)
    worst = [np.inf if lower_is_better(name) else -np.inf for name in measures]

    def measure(scores: np.ndarray, labels: np.ndarray) -> list[float]:
        return worst if np.isnan(scores).any() else compute_measures(measures, scores, labels)

    rows = np.array([measure(*task_kind.scored(*pair)) for pair in pairs]).reshape(-1, len(measures))
    return dict(zip(measures, rows.T, strict=True))
