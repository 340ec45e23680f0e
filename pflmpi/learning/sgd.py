"""Training: the only loop over minibatches that changes parameters, and its single step for algorithms with their own.

Inside a vmapped call (`task.batched`) the same code trains many clients at once: batches are then padded, and a step
without a real sample changes nothing.
"""

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.learning.client import Batch, Loss
from pflmpi.learning.gradients import gradients
from pflmpi.learning.replay import Steps
from pflmpi.learning.task import Task
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Phase:
    """One of several steps that are taken on every minibatch, one after another.

    Attributes:
        loss: from (params, batch) to a scalar; see `train`.
        parts: names of the parts of the parameters that the step changes.
        lr: learning rate.
        plain: without the configured momentum and weight decay.
        limits: the values are clamped to this interval after the step.
    """

    loss: Loss
    parts: tuple[str, ...]
    lr: float
    plain: bool = False
    limits: tuple[float, float] | None = None


def train(
    task: Task, params: Tree, batches: Iterable[Batch], loss: Loss, lr: float, *, frozen: tuple[str, ...] = ()
) -> Tree:
    """The parameters after SGD over the batches; the argument is not changed.

    Momentum and weight decay are the configured ones (PyTorch's SGD: v = m v + g + w p, p = p - lr v), with the
    momentum buffer starting at zero. Batch-norm statistics (`"stats"`) follow the forward passes.

    Args:
        params: a tree of named parts, such as a model.
        batches: the minibatches in order; one step each.
        loss: from (params, batch) to a scalar. It depends on nothing else that changes during the call: a step may be
            recorded, and replayed with the batches that follow (see `replay`).
        lr: learning rate.
        frozen: the parts that are not trained.
    """
    for part in frozen:
        if part not in params:
            raise ValueError(f"frozen names {part!r}, which the model does not have; its parts are {', '.join(params)}")
    parts = tuple(part for part in params if part != "stats" and part not in frozen)
    return alternate(task, params, batches, [Phase(loss, parts, lr)])


def alternate(task: Task, params: Tree, batches: Iterable[Batch], phases: Sequence[Phase]) -> Tree:
    """The parameters after all phases on every batch; a phase sees what the one before it has changed.

    As `train`, with a momentum buffer for each phase.
    """
    params = tree.clone(params)
    movers = [SGDStep(task, params, phase) for phase in phases]

    def step(batch: Batch) -> None:
        for mover in movers:
            mover.step(batch)

    losses = [getattr(phase.loss, "__code__", None) for phase in phases]
    # On a CPU a step of one client is arithmetic: nothing is gained by replaying it.
    length = len(batches) if isinstance(batches, Sized) and (task.batched or task.device.type != "cpu") else 0
    steps = Steps(step, None if None in losses else tuple(losses), length)
    for batch in batches:
        steps.take(batch)
    return tree.map(Tensor.detach, params)


def gradient(task: Task, params: Tree, loss: Loss, batch: Batch, parts: tuple[str, ...]) -> Tree:
    """The gradient of a loss by some parts of the parameters; zero for a batch of padding alone.

    The parameters are not changed, but batch-norm statistics in `params["stats"]` follow the forward pass in place.
    """
    trained = tree.map(Tensor.detach, {part: params[part] for part in parts})
    if not task.batched:
        trained = tree.map(lambda leaf: leaf.clone().requires_grad_(True), trained)
    values = iter(gradients(task, {**params, **trained}, trained, loss, batch)[0])
    return tree.map(lambda _: next(values), trained)


def step(params: Tree, gradient: Tree, lr: float) -> Tree:
    """params - lr gradient, for the parts that the gradient has; the other parts are as they were."""
    moved = tree.map(lambda leaf, slope: leaf - lr * slope, {part: params[part] for part in gradient}, gradient)
    return {**params, **moved}


def until(
    task: Task,
    state: Tree,
    passes: Iterable[Iterable[Batch]],
    once: Callable[[Tree, Iterable[Batch]], tuple[Tree, Tensor]],
    converged: Callable[[list[Tensor]], Tensor],
) -> Tree:
    """The state after one pass after another, until it has converged; at most after all passes.

    Args:
        passes: empty ones may follow at the end.
        once: from (state, pass) to the new state and a value, such as a loss.
        converged: whether to stop, from the values so far; a boolean tensor.
    """
    values: list[Tensor] = []
    stopped: Tensor | None = None
    for batches in passes:
        new, value = once(state, batches)
        values.append(value)
        state = new if stopped is None else _where(stopped, state, new)
        stopped = converged(values) if stopped is None else stopped | converged(values)
        if not task.batched and bool(stopped):  # lanes go on together, and one that has stopped does not change
            break
    return state


def _where(condition: Tensor, state: Tree, other: Tree) -> Tree:
    return tree.map(lambda leaf, new: torch.where(condition, leaf, new), state, other)


class SGDStep:
    """Takes the steps of one phase, in place."""

    def __init__(self, task: Task, params: Tree, phase: Phase) -> None:
        self._task, self._params, self._turn = task, params, phase
        self._trained: Tree = {part: params[part] for part in phase.parts}
        self._leaves = [leaf for _, leaf in tree.leaves(self._trained)]
        training = task.training
        self._momentum, self._decay = (0.0, 0.0) if phase.plain else (training.momentum, training.weight_decay)
        self._one: Tensor | None = None  # where the backward pass of every step begins
        self._velocity = [torch.zeros_like(leaf) for leaf in self._leaves] if self._momentum else []

    def step(self, batch: Batch) -> None:
        """Take one step."""
        by_autograd = () if self._task.batched else self._leaves
        for leaf in by_autograd:
            leaf.requires_grad_(True)
        slopes, self._one = gradients(self._task, self._params, self._trained, self._turn.loss, batch, self._one)
        for leaf in by_autograd:
            leaf.requires_grad_(False)
        with torch.no_grad():
            self._descend(slopes, None if batch.padding is None else batch.padding.active)
            if self._turn.limits is not None:
                for leaf in self._leaves:
                    leaf.copy_(leaf.clamp(*self._turn.limits))  # clamp_ is not batched by vmap (PyTorch 2.15)

    def _descend(self, slopes: list[Tensor], active: Tensor | None) -> None:
        """Move the leaves; not at all where `active` is 0, so that neither decay nor momentum goes on.

        All leaves move in one call: on a GPU a call for each costs more than its arithmetic.
        """
        leaves, momentum, decay, velocity = self._leaves, self._momentum, self._decay, self._velocity
        if self._task.batched:
            leaves, slopes = _of_all_lanes(leaves, [*map(self._lane_slope, range(len(leaves)), slopes, repeat(active))])
        else:
            if decay:
                slopes = list(torch._foreach_add(slopes, leaves, alpha=decay))
            if velocity:
                torch._foreach_mul_(velocity, momentum)
                torch._foreach_add_(velocity, slopes)
                slopes = velocity
        torch._foreach_sub_(leaves, slopes, alpha=self._turn.lr)

    def _lane_slope(self, index: int, slope: Tensor, active: Tensor | None) -> Tensor:
        """What a leaf moves along, with decay and momentum; 0 where `active` is."""
        leaf, momentum, decay = self._leaves[index], self._momentum, self._decay
        if decay:
            slope = slope.add(leaf, alpha=decay) if active is None else slope + leaf * (active * decay)
        if momentum:
            velocity = self._velocity[index]
            velocity.mul_(momentum if active is None else 1 - active + active * momentum).add_(slope)
            slope = velocity if active is None else velocity * active
        return slope


def _of_all_lanes(leaves: list[Tensor], slopes: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of all lanes behind those of one, as `vmap` has no `_foreach` operations (PyTorch 2.14)."""
    behind, lanes_at = torch._C._functorch.get_unwrapped, torch._C._functorch.maybe_get_bdim
    assert all(lanes_at(one) >= 0 for one in (*leaves, *slopes)), "what trains in lanes, and its slope, differs by lane"
    moved = [behind(slope).movedim(lanes_at(slope), lanes_at(leaf)) for leaf, slope in zip(leaves, slopes, strict=True)]
    return [behind(leaf) for leaf in leaves], moved
