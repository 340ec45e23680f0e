"""The gradient of a loss by the leaves that are trained, for one client or in a lane of a vmapped call."""

from contextlib import nullcontext

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.learning.client import Batch, Loss
from pflmpi.learning.parts import overlay
from pflmpi.learning.task import Task
from pflmpi.models.padded_norm import OverRealSamples
from pflmpi.tree import Tree


def gradients(
    task: Task, params: Tree, trained: Tree, loss: Loss, batch: Batch, one: Tensor | None = None
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """The gradient of each leaf, the loss, and its derivative by itself: one, which the next step can begin with.

    On a CPU PyTorch begins with a one of its own: to be given one, or to pull back, it imports its compiler or sympy, a
    second or two of processor time. Elsewhere that saves an operation of every step.

    Args:
        trained: the leaves, which `params` has too; outside a vmapped call they require a gradient.
        one: from the step before, which saves an operation; None: made anew.
    """
    if task.architecture.draws_noise and batch.key is not None:
        params = {**params, "noise": {"key": batch.key}}  # for `Architecture.noise_key`
    if task.batched:
        return _in_a_lane(task, params, trained, loss, batch, one)
    leaves = [leaf for _, leaf in tree.leaves(trained)]
    value = loss(params, batch)
    if one is None and value.device.type != "cpu":
        one = torch.ones_like(value)
    return list(torch.autograd.grad(value, leaves, one, materialize_grads=True)), value, one


def _in_a_lane(
    task: Task, params: Tree, trained: Tree, loss: Loss, batch: Batch, one: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    leaves = [leaf for _, leaf in tree.leaves(trained)]

    def of(leaves: list[Tensor]) -> Tensor:
        rest = iter(leaves)
        assert batch.padding is not None
        padded = task.architecture.has_batch_norm and not batch.padding.full
        with OverRealSamples(batch.padding.weight) if padded else nullcontext():
            value = loss(overlay(params, tree.map(lambda _: next(rest), trained)), batch)
        # A step of padding alone must have no gradient at all, also not that of a proximal term.
        return value if batch.padding.active is None else batch.padding.active * value

    def with_gradients(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        value = of(leaves)
        return value, list(torch.autograd.grad(value, leaves, materialize_grads=True))

    # Of a list, not of a tree: torch.func walks nested dicts several times, which costs as much as a small model. And
    # not by `torch.func.grad`, which keeps all it does for second derivatives.
    if leaves[0].device.type == "cpu":
        value, _, found = torch.func.vjp(with_gradients, leaves, has_aux=True)  # type: ignore[misc]
        return found, value, None
    value, pull_back = torch.func.vjp(of, leaves)[:2]
    with torch.no_grad():
        one = torch.ones_like(value) if one is None else one
        pulled: list[Tensor] = pull_back(one)[0]
    return pulled, value, one
