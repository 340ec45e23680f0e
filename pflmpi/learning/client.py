"""A client's data, and computations on it besides training: losses, class means, noise.

Everything here runs for one client. Inside a vmapped call (`task.batched`) the same code runs for many at once:
batches are then padded, and `Padding` marks real samples.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pflmpi import tree
from pflmpi.learning.optimizers import Rate
from pflmpi.learning.task import Task
from pflmpi.models.noise import uniform as uniform
from pflmpi.tree import Tree
from pflmpi.vmap_lanes import in_vmap, of_all_lanes


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """||a - b||^2 over all leaves of `b`; parts that only `a` has do not count."""
    b_leaves = dict(tree.leaves(b))
    distance: Tensor = _SquaredDistance.apply(*(tree.at(a, path) for path in b_leaves), *b_leaves.values())[0]
    return distance


class _SquaredDistance(torch.autograd.Function):
    """The squared distance and the differences, with the bits of autograd's own formula in fewer operations.

    Autograd's formula would double the operations of a small step. Outside vmap, `_foreach` operations take all leaves
    in one call: on a GPU, a call per leaf of a deep network costs more than its training.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves, others = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        if in_vmap():
            differences = [*map(torch.sub, leaves, others)]
            squares = [*map(torch.mul, differences, differences)]
        else:
            differences = list(torch._foreach_sub(leaves, others))
            squares = list(torch._foreach_mul(differences, differences))
        return torch.stack([square.sum() for square in squares]).sum(), *differences

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad_distance: Tensor | None, *grad_differences: Tensor | None) -> Any:
        """Twice the difference for each leaf; `grad_differences` are not None in second derivatives."""
        grads: list[Tensor | None] = list(grad_differences)
        if grad_distance is not None:
            differences, factor = ctx.saved_tensors, grad_distance * 2.0
            if in_vmap() or torch.is_grad_enabled():  # `_foreach_mul` has no gradient with respect to a scalar tensor
                products = [factor * difference for difference in differences]
            else:
                products = list(torch._foreach_mul(differences, factor))
            grads = [
                product if grad is None else product + grad
                for product, grad in zip(products, grad_differences, strict=True)
            ]
        needed = ctx.needs_input_grad[len(grads) :]
        other_grads = [-grad if need and grad is not None else None for grad, need in zip(grads, needed, strict=True)]
        return *grads, *other_grads


@dataclass(frozen=True)
class Padding:
    """Which samples of a padded batch are real."""

    weight: Tensor  # [B] float32, 1 for real samples, 0 for padding
    share: Tensor  # [B] float32, the weight over the number of real samples
    target: Tensor | None  # [B, K] float32, minus the one-hot label times the share; None where labels are no classes
    active: Tensor | None  # [] float32, 0 for a batch without real samples; None: every lane has a real sample


@dataclass(frozen=True)
class Batch:
    """One prepared minibatch on the device."""

    x: Tensor  # [B, C, H, W] float32
    y: Tensor  # [B] int64; of other tasks than classification [B, ...]
    padding: Padding | None = None  # None: every sample is real
    key: Tensor | None = None  # [] int64, the key of this batch's noise; set for what `draws_noise`
    smoothing: float = 0.0  # share of each label that cross-entropy spreads over all classes

    @property
    def active(self) -> Tensor | float:
        """1 if the batch has a real sample, 0 if it is only padding."""
        return 1.0 if self.padding is None or self.padding.active is None else self.padding.active

    @property
    def count(self) -> Tensor | float:
        """Number of real samples; `len(batch.y)` counts padding too."""
        return float(len(self.y)) if self.padding is None else self.padding.weight.sum()


StepBatch = Batch | tuple[Batch, ...]  # the input of one step: a minibatch, or several

_MICRO_BATCH_KEY = 0x1B873593CC9E2D51  # between the noise keys of two micro batches: an odd number of 61 bits


def micro_batches(batch: Batch, size: int) -> Iterator[tuple[Batch, Tensor | float]]:
    """Parts of at most `size` samples, each with its share of the real samples and its own noise key."""
    count = len(batch.y)
    for number, start in enumerate(range(0, count, size)):
        rows, padding = slice(start, start + size), batch.padding
        weight: Tensor | float = min(size, count - start) / count
        if padding is not None:
            weight = padding.share[rows].sum()
            scale = 1 / weight.clamp(min=1 / count)  # without a real sample, everything scaled by it is 0
            target = None if padding.target is None else padding.target[rows] * scale
            padding = replace(padding, weight=padding.weight[rows], share=padding.share[rows] * scale, target=target)
        key = batch.key + number * _MICRO_BATCH_KEY % (1 << 62) if batch.key is not None and number else batch.key
        yield replace(batch, x=batch.x[rows], y=batch.y[rows], padding=padding, key=key), weight


class Passes(dict[str, Iterable[Batch]]):
    """Passes by name; an unknown name says where passes are declared."""

    def __missing__(self, name: str) -> Iterable[Batch]:
        raise LookupError(
            f"there is no pass {name!r} here; known: {', '.join(self) or 'none'}. Return it from `passes`, and for "
            "`adapt` name it in `adapts_with`"
        )


@dataclass(frozen=True)
class ClientData:
    """A client's data in one round."""

    passes: dict[str, Iterable[Batch]]  # the shuffled passes of `Algorithm.passes`, by name
    train: Iterable[Batch]  # the whole training split once, in stored order
    class_counts: Tensor  # [K] float32, training samples per class; [1], their number, where labels are not classes
    learning_rate: Rate  # of this round
    round: int  # counts from 1; 0 in an introduction
    decay: Rate = 1.0  # the schedule's factor on `training.lr` in this round, for the algorithm's own learning rates

    @property
    def num_samples(self) -> Tensor:
        """n_i, the number of training samples, [] float32."""
        return self.class_counts.sum()

    @property
    def holds(self) -> Tensor:
        """[K] bool, the classes of the client's training samples."""
        return self.class_counts > 0


class StoredBatches(Iterable[Batch]):
    """A pass over samples of a client's training split."""

    @abstractmethod
    def with_features(self, split: "StoredBatches", features: Tensor, labels: Tensor) -> "StoredBatches | None":
        """The same batches with rows of `features` in place of samples; None if samples are transformed.

        Args:
            split: the whole training split in stored order.
            features, labels: [n, ...] of its samples, padding at the end.
        """


_MAX_FEATURE_BYTES = 2**27  # over all lanes of a call


def on_features(task: Task, model: Tree, data: ClientData, *passes: str) -> tuple[Task, ClientData]:
    """The task and the client's data with features of the model's fixed body in place of samples.

    Each sample goes through the body once, in evaluation mode, however many passes use it; if samples are transformed,
    or all features together exceed 128 MiB, once per batch instead.

    Args:
        passes: names of the passes that the returned data has.
    """
    if task.cached_features:
        return task, data
    split = data.train if isinstance(data.train, StoredBatches) else None
    features_and_labels = None if split is None else _compute_features(task, model, split)

    def to_features(batches: Iterable[Batch]) -> Iterable[Batch]:
        stored = None
        if split is not None and features_and_labels is not None and isinstance(batches, StoredBatches):
            stored = batches.with_features(split, *features_and_labels)
        return _FeatureBatches(task, model, batches) if stored is None else stored

    feature_passes: dict[str, Iterable[Batch]] = {name: to_features(data.passes[name]) for name in passes}
    feature_data = replace(data, passes=Passes(feature_passes), train=to_features(data.train))
    return task.replace(cached_features=True), feature_data


def _compute_features(task: Task, model: Tree, split: StoredBatches) -> tuple[Tensor, Tensor] | None:
    """Features and labels [n, ...] of all samples, padding at the end; None if they are too large to keep."""
    batches: list[Batch] = []
    num_bytes = 0
    for batch in _FeatureBatches(task, model, split):
        batches.append(batch)
        num_bytes += of_all_lanes(batch.x).nbytes
        if num_bytes > _MAX_FEATURE_BYTES:
            return None
    return torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])


@dataclass(frozen=True)
class _FeatureBatches(Iterable[Batch]):
    """Batches with features in place of samples, computed anew in every pass."""

    task: Task
    model: Tree
    batches: Iterable[Batch]

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            with torch.no_grad():
                z = self.task.features(self.model, batch.x)
            yield replace(batch, x=z)


Loss = Callable[[Tree, Batch], Tensor]


class Counted:
    """A pass that counts its steps while a training iterates over it.

    Attributes:
        steps: [] float32, the number of minibatches so far with a real sample.
    """

    def __init__(self, data: ClientData, name: str) -> None:
        self._batches, self.steps = data.passes[name], torch.zeros_like(data.class_counts[0])

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self.steps = self.steps + batch.active
            yield batch


def average(values: Tensor, batch: Batch) -> Tensor:
    """The mean of per-sample values [B] over the real samples of a batch."""
    if values.shape != batch.y.shape[:1]:
        raise ValueError(
            f"average: the values have shape {list(values.shape)}; expected is {list(batch.y.shape[:1])}, one for each "
            "sample of the batch: take a sum or a mean over the other axes first"
        )
    return values.mean() if batch.padding is None else (values * batch.padding.share).sum()


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy of logits [B, K] over the real samples of a batch."""
    if batch.y.ndim > 1 or batch.y.is_floating_point():
        raise ValueError("the labels are no classes: task_loss(task, scores, batch) is the loss of any task")
    if batch.padding is None:
        return F.cross_entropy(logits, batch.y, label_smoothing=batch.smoothing)
    # A product with the one-hot label instead of nll_loss, whose batched form is several times slower.
    target = batch.padding.target
    assert target is not None, "they are classes"
    if batch.smoothing:
        target = target * (1 - batch.smoothing) - batch.padding.share.unsqueeze(-1) * batch.smoothing / logits.shape[-1]
    return (F.log_softmax(logits, -1) * target).sum()


def task_loss(task: Task, scores: Tensor, batch: Batch) -> Tensor:
    """The task's mean loss of scores [B, ...] over the real samples of a batch; cross-entropy for classes.

    For tokens it is the mean over all labelled positions of the batch, 0 if there are none.
    """
    if task.kind.cross_entropy:
        return cross_entropy(scores, batch)
    losses, weights = task.kind.loss(scores, batch.y), task.kind.weights(batch.y)
    if weights is None:
        return average(losses, batch)
    if batch.padding is not None:
        losses, weights = losses * batch.padding.weight, weights * batch.padding.weight
    total = weights.sum()
    return losses.sum() / total.where(total > 0, 1.0)


def model_loss(task: Task) -> Loss:
    """The plain local loss: the task's loss of the model's scores."""
    return lambda model, batch: task_loss(task, task.predict(model, batch.x, training=True), batch)


def class_means(task: Task, model: Tree, data: ClientData) -> Tree:
    """`{"means": [K, d], "counts": [K]}`: the mean feature of each class over the training split.

    The body is in evaluation mode. Classes without samples have rows of zeros.
    """
    sums = torch.zeros(task.num_classes, task.num_features, dtype=torch.float64, device=data.class_counts.device)
    classes = torch.arange(task.num_classes, device=sums.device)
    with torch.no_grad():
        for batch in data.train:
            member = (batch.y.unsqueeze(-1) == classes).to(torch.float64)  # [B, K]
            if batch.padding is not None:
                member = member * batch.padding.weight.unsqueeze(-1)
            sums = sums + member.mT @ task.features(model, batch.x).double()
    means = (sums / data.class_counts.clamp(min=1).unsqueeze(-1)).float()
    return {"means": means, "counts": data.class_counts.to(torch.int32)}
