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
    """||a - b||^2 over all leaves of `b` (a may have more parts)."""
    leaves, others = zip(*((tree.at(a, path), leaf) for path, leaf in tree.leaves(b)), strict=True)
    distance: Tensor = _SquaredDistance.apply(*leaves, *others)[0]
    return distance


class _SquaredDistance(torch.autograd.Function):
    """The same, and the differences, with the bits of autograd's own formula in fewer operations.

    Autograd's passes over the leaves are as many as all others of a small step. Outside lanes, where `_foreach` exists,
    all leaves are one call: on a GPU a call for each of a deep network costs more than its training.
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
    def backward(ctx: Any, slope: Tensor | None, *slopes: Tensor | None) -> Any:
        """Twice the difference by each leaf; `slopes`, by the differences, are for gradients of this gradient."""
        found: list[Tensor | None] = list(slopes)
        if slope is not None:
            differences, twice = ctx.saved_tensors, slope * 2.0
            one_by_one = in_vmap() or torch.is_grad_enabled()  # `_foreach_mul` has no gradient by a scalar tensor
            moved = [twice * one for one in differences] if one_by_one else torch._foreach_mul(differences, twice)
            found = [one if more is None else one + more for one, more in zip(moved, slopes, strict=True)]
        needed = ctx.needs_input_grad[len(found) :]
        others = [-one if need and one is not None else None for one, need in zip(found, needed, strict=True)]
        return *found, *others


@dataclass(frozen=True)
class Padding:
    """Which samples of a padded batch are real."""

    weight: Tensor  # [B] float32, 1 for real samples, 0 for padding
    share: Tensor  # [B] float32, the weight over the number of real samples
    target: Tensor | None  # [B, K] float32, minus the one-hot label times the share; None where labels are no classes
    active: Tensor | None  # [] float32, 0 where there is no real sample at all; None: there is one in every lane
    full: bool = False  # every sample is real, in every lane; known where the model has batch norm


@dataclass(frozen=True)
class Batch:
    """One minibatch, prepared and on the device."""

    x: Tensor  # [B, C, H, W] float32
    y: Tensor  # [B] int64; of other tasks than classification [B, ...]
    padding: Padding | None = None  # None: every sample is real
    key: Tensor | None = None  # [] int64, drawn for this batch alone; for what `draws_noise`
    smoothing: float = 0.0  # share of each label that cross-entropy spreads over all classes

    @property
    def active(self) -> Tensor | float:
        """1 if there is a real sample in the batch, 0 if it is padding alone."""
        return 1.0 if self.padding is None or self.padding.active is None else self.padding.active

    @property
    def count(self) -> Tensor | float:
        """Number of real samples; `len(batch.y)` counts padding too."""
        return float(len(self.y)) if self.padding is None else self.padding.weight.sum()


StepBatch = Batch | tuple[Batch, ...]  # what one step takes: a minibatch, or several


def micro_batches(batch: Batch, size: int) -> Iterator[tuple[Batch, Tensor | float]]:
    """Parts of at most `size` samples, each with its share of the real samples, and noise of its own."""
    count = len(batch.y)
    for number, start in enumerate(range(0, count, size)):
        rows, padding = slice(start, start + size), batch.padding
        weight: Tensor | float = min(size, count - start) / count
        if padding is not None:
            weight = padding.share[rows].sum()
            scale = 1 / weight.clamp(min=1 / count)  # without a real sample all that is scaled is 0
            target = None if padding.target is None else padding.target[rows] * scale
            padding = replace(padding, weight=padding.weight[rows], share=padding.share[rows] * scale, target=target)
        key = batch.key + number * _APART % (1 << 62) if batch.key is not None and number else batch.key
        yield replace(batch, x=batch.x[rows], y=batch.y[rows], padding=padding, key=key), weight


_APART = 0x1B873593CC9E2D51  # between the keys of two micro batches: an odd number of 61 bits


class Passes(dict[str, Iterable[Batch]]):
    """Passes by name."""

    def __missing__(self, name: str) -> Iterable[Batch]:
        raise LookupError(
            f"there is no pass {name!r} here; known: {', '.join(self) or 'none'}. Return it from `passes`, and for "
            "`adapt` name it in `adapts_with`"
        )


@dataclass(frozen=True)
class ClientData:
    """A client's data in one round."""

    passes: dict[str, Iterable[Batch]]  # the shuffled passes that the algorithm asked for, by name
    train: Iterable[Batch]  # the whole training split once, in stored order
    class_counts: Tensor  # [K] float32, training samples of each class; [1], of all, where labels are no classes
    learning_rate: Rate  # of this round
    round: int  # counts from 1; 0 in an introduction
    decay: Rate = 1.0  # the factor on `training.lr` in it, for rates of the algorithm's own

    @property
    def num_samples(self) -> Tensor:
        """n_i, the number of training samples, [] float32."""
        return self.class_counts.sum()

    @property
    def holds(self) -> Tensor:
        """[K] bool, the classes this client has training samples of."""
        return self.class_counts > 0


class StoredBatches(Iterable[Batch]):
    """A pass over samples of a client's training split."""

    @abstractmethod
    def with_features(self, split: "StoredBatches", features: Tensor, labels: Tensor) -> "StoredBatches | None":
        """The same batches with rows of `features` in place of samples; None where samples are transformed.

        Args:
            split: the whole training split in stored order.
            features, labels: [n, ...] of its samples, those of padding at the end.
        """


_MOST_FEATURES = 2**27  # bytes, of all lanes of a call


def on_features(task: Task, model: Tree, data: ClientData, *passes: str) -> tuple[Task, ClientData]:
    """The task and the data of a client with features by the model's body, which is fixed, in place of samples.

    Each sample goes through the body once, in evaluation mode, however often it is in the passes; where samples are
    transformed, or all features are more than 128 MiB, once for every batch that it is in.

    Args:
        passes: names of those that the data shall have, besides the training split.
    """
    if task.cached_features:
        return task, data
    split = data.train if isinstance(data.train, StoredBatches) else None
    samples = None if split is None else _features(task, model, split)

    def through_body(batches: Iterable[Batch]) -> Iterable[Batch]:
        stored = None
        if split is not None and samples is not None and isinstance(batches, StoredBatches):
            stored = batches.with_features(split, *samples)
        return _ThroughBody(task, model, batches) if stored is None else stored

    named: dict[str, Iterable[Batch]] = {name: through_body(data.passes[name]) for name in passes}
    of_features = replace(data, passes=Passes(named), train=through_body(data.train))
    return task.replace(cached_features=True), of_features


def _features(task: Task, model: Tree, split: StoredBatches) -> tuple[Tensor, Tensor] | None:
    """Features and labels [n, ...] of all samples, those of padding at the end; None where they are too many."""
    batches: list[Batch] = []
    for batch in _ThroughBody(task, model, split):
        batches.append(batch)
        if sum(of_all_lanes(batch.x).nbytes for batch in batches) > _MOST_FEATURES:
            return None
    return torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])


@dataclass(frozen=True)
class _ThroughBody(Iterable[Batch]):
    """Batches with features in place of samples, computed when they are asked for."""

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
    """A pass that counts the steps of the training that takes its minibatches.

    Attributes:
        steps: [] float32, the minibatches so far that had a real sample.
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
    """The mean loss of scores [B, ...] over the real samples of a batch, as the task has it: of classes cross-entropy.

    Of tokens it is the mean over all positions of the batch that have a label, 0 without any.
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
    """The plain loss: the task's, of the model's own scores."""
    return lambda model, batch: task_loss(task, task.predict(model, batch.x, training=True), batch)


def class_means(task: Task, model: Tree, data: ClientData) -> Tree:
    """`{"means": [K, d], "counts": [K]}`: the mean feature of each class over the training split.

    The body is in evaluation mode. Rows of classes that the client does not hold are zero.
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
