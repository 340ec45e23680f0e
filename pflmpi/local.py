"""What clients do with their data: the only training loop, the losses, and class means.

Everything here runs for one client. Inside a vmapped call (`task.batched`) the same code runs for many at once:
batches are then padded, `Padding` marks real samples, and a step without any changes nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pflmpi import tree
from pflmpi.task import Task
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Padding:
    """Which samples of a padded batch are real."""

    weight: Tensor  # [B] float32, 1 for real samples, 0 for padding
    share: Tensor  # [B] float32, the weight over the number of real samples
    target: Tensor  # [B, K] float32, minus the one-hot label times the share
    active: Tensor | None  # [] float32, 0 where there is no real sample at all; None: there is one in every lane


@dataclass(frozen=True)
class Batch:
    """One minibatch, prepared and on the device."""

    x: Tensor  # [B, C, H, W] float32
    y: Tensor  # [B] int64
    padding: Padding | None = None  # None: every sample is real


@dataclass(frozen=True)
class ClientData:
    """What a client knows of its own data in one round."""

    passes: dict[str, Iterable[Batch]]  # the shuffled passes that the algorithm asked for, by name
    train: Iterable[Batch]  # the whole training split once, in stored order
    class_counts: Tensor  # [K] float32, training samples of each class
    learning_rate: float  # of this round

    @property
    def num_samples(self) -> Tensor:
        """n_i, the number of training samples."""
        return self.class_counts.sum()

    @property
    def holds(self) -> Tensor:
        """[K] bool, the classes this client has training samples of."""
        return self.class_counts > 0


Loss = Callable[[Tree, Batch], Tensor]


def average(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean of per-sample values [B] over the real samples of a batch."""
    return values.mean() if batch.padding is None else (values * batch.padding.share).sum()


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of logits [B, K] over the real samples of a batch."""
    if batch.padding is None:
        return F.cross_entropy(logits, batch.y)
    # A product with the one-hot label instead of nll_loss, whose batched form is several times slower.
    return (F.log_softmax(logits, -1) * batch.padding.target).sum()


def model_loss(task: Task) -> Loss:
    """Return the plain loss: cross-entropy of the model's own logits."""
    return lambda model, batch: cross_entropy(task.predict(model, batch.x, training=True), batch)


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """Return ||a - b||^2 over all leaves of `b` (a may have more parts)."""
    return torch.stack([(_at(a, path) - leaf).square().sum() for path, leaf in tree.leaves(b)]).sum()


def train(
    task: Task, params: Tree, batches: Iterable[Batch], loss: Loss, lr: float, *, frozen: tuple[str, ...] = ()
) -> Tree:
    """Return the parameters after SGD over the batches; the argument is not changed.

    Momentum and weight decay are the configured ones (PyTorch's SGD: v = m v + g + w p, p = p - lr v), with the
    momentum buffer starting at zero. Batch-norm statistics (`"stats"`) follow the forward passes.

    Args:
        params: a tree of named parts, such as a model.
        batches: the minibatches in order; one step each.
        loss: from (params, batch) to a scalar.
        lr: learning rate.
        frozen: the parts that are not trained.
    """
    params = tree.clone(params)
    trained: Tree = {part: value for part, value in params.items() if part != "stats" and part not in frozen}
    leaves = [leaf for _, leaf in tree.leaves(trained)]
    velocity = [torch.zeros_like(leaf) for leaf in leaves] if task.training.momentum else []
    gradients_of = _lane_gradients if task.batched else _gradients
    if not task.batched:
        for leaf in leaves:
            leaf.requires_grad_(True)
    for batch in batches:
        gradients = gradients_of(params, trained, loss, batch)
        with torch.no_grad():
            active = None if batch.padding is None else batch.padding.active
            _descend(task, leaves, gradients, velocity, lr, active)
    return tree.map(Tensor.detach, params)


def _gradients(params: Tree, trained: Tree, loss: Loss, batch: Batch) -> Sequence[Tensor]:
    leaves = [leaf for _, leaf in tree.leaves(trained)]
    return torch.autograd.grad(loss(params, batch), leaves, materialize_grads=True)


def _lane_gradients(params: Tree, trained: Tree, loss: Loss, batch: Batch) -> Sequence[Tensor]:
    leaves = [leaf for _, leaf in tree.leaves(trained)]

    def of(leaves: list[Tensor]) -> Tensor:
        rest = iter(leaves)
        value = loss({**params, **tree.map(lambda _: next(rest), trained)}, batch)
        assert batch.padding is not None
        # A step of padding alone must have no gradient at all, also not that of a proximal term.
        return value if batch.padding.active is None else batch.padding.active * value

    # Of a list, not of a tree: torch.func walks nested dicts several times, which costs as much as a small model. And
    # not by `torch.func.grad`, which keeps all it does for second derivatives.
    value, pull_back = torch.func.vjp(of, leaves)[:2]
    with torch.no_grad():
        gradients: list[Tensor] = pull_back(torch.ones_like(value))[0]
    return gradients


def _descend(
    task: Task,
    leaves: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocity: Sequence[Tensor],
    lr: float,
    active: Tensor | None,
) -> None:
    """Take one SGD step in place; none where `active` is 0, so that neither decay nor momentum goes on."""
    momentum, decay = task.training.momentum, task.training.weight_decay
    for i, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        if decay:
            gradient = gradient.add(leaf, alpha=decay) if active is None else gradient + leaf * (active * decay)
        if velocity:
            velocity[i].mul_(momentum if active is None else 1 - active + active * momentum).add_(gradient)
            gradient = velocity[i] if active is None else velocity[i] * active
        leaf.sub_(gradient, alpha=lr)


def class_means(task: Task, model: Tree, data: ClientData) -> Tree:
    """Return `{"means": [K, d], "counts": [K]}`: the mean feature of each class over the training split.

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


def _at(params: Tree, path: str) -> Tensor:
    node: Tensor | Tree = params
    for key in path.split("/"):
        assert isinstance(node, dict)
        node = node[key]
    assert isinstance(node, Tensor)
    return node
