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
    task: Task, params: Tree, trained: Tree, loss: Loss, batch: Batch, grad_output: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """The gradient of each leaf, and the loss.

    On a CPU PyTorch begins with a one of its own: to be given one, or to pull back, it imports its compiler or sympy, a
    second or two of processor time. Elsewhere that saves an operation of every step.

    Args:
        trained: the leaves, which `params` has too; outside a vmapped call they require a gradient.
        grad_output: where the backward pass begins, by `unit_grad_output`; None: made anew.
    """
    if task.architecture.draws_noise and batch.key is not None:
        params = {**params, "noise": {"key": batch.key}}  # for `Architecture.noise_key`
    if task.batched:
        return _in_a_lane(task, params, trained, loss, batch, grad_output)
    leaves = [leaf for _, leaf in tree.leaves(trained)]
    value = _scalar(loss(params, batch))
    begin = None if value.device.type == "cpu" else _fitting(grad_output, value)
    return list(torch.autograd.grad(value, leaves, begin, materialize_grads=True)), value


def unit_grad_output(like: Tensor) -> Tensor | None:
    """The one that backward passes begin with, for all steps of a pass; None on a CPU.

    Args:
        like: a leaf that is trained, which differs between lanes if there are any.
    """
    return None if like.device.type == "cpu" else torch.ones_like(like.detach().reshape(-1)[0])


def _scalar(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim:
        found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise ValueError(
            f"the loss has {found}; expected a scalar tensor, such as cross_entropy(scores, batch), or average(values, "
            "batch) of values [B]"
        )
    return loss


def _fitting(grad_output: Tensor | None, loss: Tensor) -> Tensor:
    return torch.ones_like(loss) if grad_output is None or grad_output.dtype != loss.dtype else grad_output


def _in_a_lane(
    task: Task, params: Tree, trained: Tree, loss: Loss, batch: Batch, grad_output: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    leaves = [leaf for _, leaf in tree.leaves(trained)]

    def of(leaves: list[Tensor]) -> Tensor:
        rest = iter(leaves)
        assert batch.padding is not None
        padded = task.architecture.has_batch_norm and not batch.padding.full
        with OverRealSamples(batch.padding.weight) if padded else nullcontext():
            value = _scalar(loss(overlay(params, tree.map(lambda _: next(rest), trained)), batch))
        # A step of padding alone must have no gradient at all, also not that of a proximal term.
        return value if batch.padding.active is None else batch.padding.active * value

    def with_gradients(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        value = of(leaves)
        return value, list(torch.autograd.grad(value, leaves, materialize_grads=True))

    # Of a list, not of a tree: torch.func walks nested dicts several times, which costs as much as a small model. And
    # not by `torch.func.grad`, which keeps all it does for second derivatives.
    if leaves[0].device.type == "cpu":
        value, _, found = torch.func.vjp(with_gradients, leaves, has_aux=True)  # type: ignore[misc]
        return found, value
    value, pull_back = torch.func.vjp(of, leaves)[:2]
    with torch.no_grad():
        pulled: list[Tensor] = pull_back(_fitting(grad_output, value))[0]
    return pulled, value
