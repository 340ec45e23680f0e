"""Training: the only loop over minibatches that changes parameters, and its single step for algorithms with their own.

Inside a vmapped call (`task.batched`) the same code trains many clients at once: batches are then padded, and a step
without a real sample changes nothing.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.learning.client import Batch, Loss, StepBatch, micro_batches
from pflmpi.learning.cuda_graphs import capture_on
from pflmpi.learning.optimizers import Rate, Slopes, adam_step, clip, initial_state
from pflmpi.learning.parts import has, others, overlay, trained
from pflmpi.learning.replay import ReadsElsewhere, Steps, contents, name_of
from pflmpi.learning.task import Task
from pflmpi.models.padded_norm import OverRealSamples
from pflmpi.tree import Tree
from pflmpi.vmap_lanes import in_lane, lane_axis, of_all_lanes

_NOTHING: Tree = {}


@dataclass(frozen=True)
class Direction:
    """What the steps of a training go against where that is not the gradient of one loss.

    A step of Adam or SGD, with momentum and whatever else is configured, takes it as a gradient. A training may then
    take several minibatches in a step, as tuples; see Per-FedAvg.

    Attributes:
        of: from (params, batch) to the direction, a tree of the parts that are trained, and a scalar, the loss that is
            reported. It reads no tensor from elsewhere, as a loss.
    """

    of: Callable[[Tree, Any], tuple[Tree, Tensor]]


@dataclass(frozen=True)
class Phase:
    """One of several steps that are taken on every minibatch, one after another.

    Attributes:
        loss: from (params, batch) to a scalar, or a direction; see `train`.
        parts: paths of the parts of the parameters that the step changes, such as "head" or "body/fc1".
        plain: plain SGD whatever is configured: no Adam, momentum, weight decay or clipping; its loss counts nowhere.
        limits: the values are clamped to this interval after the step.
        name: under which optimizer state is kept between rounds, and the loss counts; see `Algorithm.trainings`.
    """

    loss: Loss | Direction
    parts: tuple[str, ...]
    lr: Rate
    plain: bool = False
    limits: tuple[float, float] | None = None
    name: str = "train"

    @property
    def function(self) -> Callable[..., Any]:
        """The loss, or what computes the direction."""
        return self.loss.of if isinstance(self.loss, Direction) else self.loss


def train(
    task: Task,
    params: Tree,
    batches: Iterable[StepBatch],
    loss: Loss | Direction,
    lr: Rate,
    *,
    frozen: tuple[str, ...] = (),
    name: str = "train",
    fixed: Tree = _NOTHING,
) -> Tree:
    """The parameters after the configured optimizer's steps over the batches; the argument is not changed.

    SGD is PyTorch's (v = m v + g + w p, p = p - lr v), as are Adam and AdamW; momentum and moments start at zero, or,
    with `training.keep_optimizer`, as the client's last round left them. A leaf on which the loss of a batch does not
    depend stays as it is in that step, without decay or momentum, as in PyTorch. Batch-norm statistics (`"stats"`)
    follow the forward passes.

    Args:
        params: a tree of named parts, such as a model.
        batches: the minibatches in order; one step each.
        loss: from (params, batch) to a scalar, or a direction to go against. It reads no tensor from elsewhere: a step
            is traced once in a run and replayed from then on (see `replay`).
        frozen: paths of what is not trained, such as "head" or "body/fc1".
        name: of the training, where a client has several; see `Phase`.
        fixed: what the loss reads besides, as further parts of its `params`; neither trained nor returned.
    """
    for path in frozen:
        if not has(params, path):
            raise ValueError(f"frozen names {path!r}, which the model does not have; its parts are {', '.join(params)}")
    parts = tuple(others(params, ("stats", *frozen)))
    return alternate(task, params, batches, [Phase(loss, parts, lr, name=name)], fixed=fixed)


def alternate(
    task: Task, params: Tree, batches: Iterable[StepBatch], phases: Sequence[Phase], *, fixed: Tree = _NOTHING
) -> Tree:
    """The parameters after all phases on every batch; a phase sees what the one before it has changed.

    As `train`, with an optimizer for each phase.
    """
    suits = task.device.type == "cpu" or task.training.precision != "fp32"  # as a GPU's tensor cores take them
    channels_last = task.architecture.trains_channels_last and suits and not task.batched
    params = tree.map(_copy_channels_last, params) if channels_last else tree.clone(params)
    if twice := params.keys() & fixed.keys():
        raise ValueError(f"`fixed` has {', '.join(sorted(twice))}, which the parameters have too; choose other names")
    movers = [PhaseStep(task, {**params, **fixed}, phase) for phase in phases]

    def step(batch: StepBatch) -> None:
        for mover in movers:
            mover.step(batch)

    steps = _steps(task, step, movers, params, fixed)
    for batch in batches:
        try:
            steps.take(batch)
        except ReadsElsewhere as error:
            raise ValueError(_elsewhere(error.tensor, phases)) from error
        for mover in movers:
            mover.count(_first(batch))
    steps.end()
    for mover in movers:
        mover.end()
    return tree.map(lambda leaf: leaf.detach().contiguous() if channels_last else leaf.detach(), params)


def _steps(
    task: Task, step: Callable[[StepBatch], None], movers: Sequence["PhaseStep"], params: Tree, fixed: Tree
) -> Steps:
    """The steps of a pass, replayed where that is possible and worth it."""
    # On a CPU a step of one client is arithmetic: nothing is gained by replaying it.
    worth = task.architecture.replays_steps and (task.batched or task.device.type != "cpu")
    kinds = [mover.kind for mover in movers] if worth else [None]
    if None in kinds:
        return Steps(step, None, (), 0, ())
    changed = [leaf for _, leaf in tree.leaves(params)] + [tensor for mover in movers for tensor in mover.tensors]
    rates = tuple(rate for mover in movers for rate in mover.rates)
    read = [leaf for read in (fixed, task.frozen.on(task.device)) for _, leaf in tree.leaves(read)]
    return Steps(step, (task, *kinds), [*changed, *read], len(changed), rates)


def _first(batch: StepBatch) -> Batch:
    """The one that says whether a step has a real sample."""
    return batch[0] if isinstance(batch, tuple) else batch


def _elsewhere(tensor: Tensor, phases: Sequence[Phase]) -> str:
    name = next(filter(None, (name_of(tensor, phase.function) for phase in phases)), "")
    what, key = (f"the tensor {name!r}", name) if name else ("a tensor", "NAME")
    return (
        f"the loss reads {what} of shape {tuple(tensor.shape)} that is in neither its parameters nor its batch; give "
        f"it to `train` or `alternate` as fixed={{{key!r}: ...}}, and read params[{key!r}]"
    )


def gradient(task: Task, params: Tree, loss: Loss, batch: Batch, parts: tuple[str, ...]) -> tuple[Tree, Tensor]:
    """The gradient of a loss by some parts of the parameters, and its value; zero for a batch of padding alone.

    The parameters are not changed, but batch-norm statistics in `params["stats"]` follow the forward pass in place.
    """
    weights = tree.map(Tensor.detach, trained(params, parts))
    if not task.batched:
        weights = tree.map(lambda leaf: leaf.clone().requires_grad_(True), weights)
    slopes, value = gradients(task, overlay(params, weights), weights, loss, batch)
    values = iter(slopes)

    def filled(leaf: Tensor) -> Tensor:
        slope = next(values)
        return torch.zeros_like(leaf) if slope is None else slope

    return tree.map(filled, weights), value.detach()


def step(params: Tree, gradient: Tree, lr: Rate) -> Tree:
    """params - lr gradient, for the parts that the gradient has; the other parts are as they were."""
    moved = tree.map(lambda slope, leaf: leaf - lr * slope, gradient, params)
    return overlay(params, moved)


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


def _copy_channels_last(leaf: Tensor) -> Tensor:
    """A copy whose second axis is innermost in memory, if it has four, as the weights of a convolution do."""
    return leaf.clone(memory_format=torch.channels_last if leaf.dim() == 4 else torch.contiguous_format)


def _where(condition: Tensor, state: Tree, other: Tree) -> Tree:
    return tree.map(lambda leaf, new: torch.where(condition, leaf, new), state, other)


def gradients(
    task: Task, params: Tree, trained: Tree, loss: Loss, batch: Batch, grad_output: Tensor | None = None
) -> tuple[Slopes, Tensor]:
    """The gradient of each leaf, and the loss: accumulated over micro batches, where the batch is larger than one.

    On a CPU PyTorch begins with a one of its own: to be given one, or to pull back, it imports its compiler or sympy, a
    second or two of processor time. Elsewhere that saves an operation of every step.

    Args:
        trained: the leaves, which `params` has too; outside a vmapped call they require a gradient.
        grad_output: where the backward pass begins, by `unit_grad_output`; None: made anew.
    """
    size = task.training.micro_batch
    if size is None or len(batch.y) <= size:
        return _at_once(task, params, trained, loss, batch, grad_output)
    slopes: Slopes = [None for _ in tree.leaves(trained)]
    value: Tensor | None = None
    for part, weight in micro_batches(batch, size):

        def share(params: Tree, part: Batch, weight: Tensor | float = weight) -> Tensor:
            return weight * _scalar(loss(params, part))

        more, of_part = _at_once(task, params, trained, share, part, grad_output)
        slopes, value = [*map(_sum, slopes, more)], _sum(value, of_part.detach())
    assert value is not None
    return slopes, value


@overload
def _sum(one: Tensor | None, other: Tensor) -> Tensor: ...
@overload
def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None: ...
def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Their sum, or the one that there is."""
    return other if one is None else one if other is None else one + other


def _at_once(
    task: Task, params: Tree, trained: Tree, loss: Loss, batch: Batch, grad_output: Tensor | None
) -> tuple[Slopes, Tensor]:
    if task.architecture.draws_noise and batch.key is not None:
        params = {**params, "noise": {"key": batch.key}}  # for `Architecture.noise_key`
    if task.batched:
        return _in_a_lane(task, params, trained, loss, batch, grad_output)
    leaves = [leaf for _, leaf in tree.leaves(trained)]
    value = _scalar(loss(params, batch))
    begin = None if value.device.type == "cpu" else _fitting(grad_output, value)
    return list(torch.autograd.grad(value, leaves, begin, allow_unused=True)), value


def unit_grad_output(like: Tensor) -> Tensor | None:
    """Reusable scalar `grad_outputs` for all steps of a pass; None on a CPU, where to pass it imports a compiler.

    Args:
        like: a leaf that is trained, which differs between lanes if there are any.
    """
    return None if like.device.type == "cpu" else torch.ones_like(like.detach().reshape(-1)[0])


def _scalar(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim:
        described = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise ValueError(
            f"the loss has {described}; expected a scalar tensor, such as cross_entropy(scores, batch), or "
            "average(values, batch) of values [B]"
        )
    return loss


def _fitting(grad_output: Tensor | None, loss: Tensor) -> Tensor:
    return torch.ones_like(loss) if grad_output is None or grad_output.dtype != loss.dtype else grad_output


def _in_a_lane(
    task: Task, params: Tree, trained: Tree, loss: Loss, batch: Batch, grad_output: Tensor | None
) -> tuple[Slopes, Tensor]:
    leaves = [leaf for _, leaf in tree.leaves(trained)]
    reached: list[int] = []

    def with_gradients(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        rest = iter(leaves)
        assert batch.padding is not None
        padded = task.architecture.has_batch_norm and not batch.padding.full
        with OverRealSamples(batch.padding.weight) if padded else nullcontext():
            value = _scalar(loss(overlay(params, tree.map(lambda _: next(rest), trained)), batch))
        if batch.padding.active is not None:  # a step of padding alone has no gradient, also not of a proximal term
            value = batch.padding.active * value
        begin = None if value.device.type == "cpu" else _fitting(grad_output, value)
        slopes = torch.autograd.grad(value, leaves, begin, allow_unused=True)
        reached[:] = [place for place, slope in enumerate(slopes) if slope is not None]
        return value, [slope for slope in slopes if slope is not None]

    # Of a list, not of a tree: torch.func walks nested dicts several times, which costs as much as a small model. And
    # not by `torch.func.grad`, which keeps all it does for second derivatives.
    value, _, found = torch.func.vjp(with_gradients, leaves, has_aux=True)  # type: ignore[misc]
    slopes: Slopes = [None] * len(leaves)
    for place, slope in zip(reached, found, strict=True):
        slopes[place] = slope
    return slopes, value


class PhaseStep:
    """Takes the steps of one phase, in place."""

    def __init__(self, task: Task, params: Tree, phase: Phase) -> None:
        self._task, self._params, self._phase = task, params, phase
        self._trained: Tree = trained(params, phase.parts)
        self._leaves = [leaf for _, leaf in tree.leaves(self._trained)]
        training = task.training
        self._momentum, self._decay = (0.0, 0.0) if phase.plain else (training.momentum, training.weight_decay)
        self._norm = None if phase.plain else training.clip_norm
        self._adam = training.optimizer != "sgd" and not phase.plain
        self._local = None if phase.plain else task.local
        self._loss_sum: Tensor | None = None
        self._reached: list[bool] | None = None  # the leaves with a gradient in the steps so far
        self._grad_output = unit_grad_output(self._leaves[0])
        self._state: Tree = {} if phase.plain else initial_state(training, self._trained)
        if self._local is not None:
            self._state = self._local.begin(phase.name, self._state)
            self._loss_sum = self._local.loss_sum(phase.name, self._leaves[0])
        self._velocity = [leaf for _, leaf in tree.leaves(self._state)] if self._momentum else []
        self._rate = phase.lr
        if isinstance(self._rate, float) and capture_on(self._leaves[0].device):
            self._rate = torch.full((), self._rate, device=self._leaves[0].device)  # so that it may fall

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that a step changes, then those that it only reads, besides parameters and batch."""
        own = [leaf for _, leaf in tree.leaves(self._state)] + [self._loss_sum, self._grad_output]
        return [tensor for tensor in (*own, self._rate) if isinstance(tensor, Tensor)]

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate, where a traced step takes it as a number."""
        return () if self._adam or isinstance(self._rate, Tensor) or self._rate == 1 else (self._rate,)

    @property
    def kind(self) -> Hashable:
        """Key of the operations of a step, besides the task and the layout of its tensors; None: not known."""
        phase = self._phase
        function = contents(phase.function)
        if function is None:
            return None
        rate: float | bool | None = None  # a tensor, which is a part of the state
        if not isinstance(self._rate, Tensor):
            rate = self._rate if self._adam else self._rate == 1  # see `_descend`
        return function, type(phase.loss), phase.parts, phase.plain, phase.limits, self._loss_sum is None, rate

    def step(self, batch: StepBatch) -> None:
        padding = _first(batch).padding
        active = None if padding is None else padding.active
        slopes, loss = self._slopes(batch, active)
        with torch.no_grad():
            if self._loss_sum is not None:
                self._loss_sum.add_(loss)
            if self._norm is not None:
                slopes = clip(slopes, self._norm)
            if self._adam:
                self._check_same([slope is not None for slope in slopes])
                adam_step(self._task.training, self._leaves, slopes, self._state, active, self._rate)
            else:
                self._descend(slopes, active)
            if self._phase.limits is not None:
                for leaf in self._leaves:
                    leaf.copy_(leaf.clamp(*self._phase.limits))  # clamp_ is not batched by vmap (PyTorch 2.15)

    def _slopes(self, batch: StepBatch, active: Tensor | None) -> tuple[Slopes, Tensor]:
        """What to go against, for each leaf, and the loss; zero where `active` is."""
        loss = self._phase.loss
        if isinstance(loss, Direction):
            direction, value = loss.of(self._params, batch)
            against = self._checked_leaves(direction)
            if active is not None:
                against, value = [active * slope for slope in against], active * value
            return [*against], _scalar(value).detach()
        assert isinstance(batch, Batch), "a loss is that of one minibatch"
        by_autograd = () if self._task.batched else self._leaves
        for leaf in by_autograd:
            leaf.requires_grad_(True)
        slopes, value = gradients(self._task, self._params, self._trained, loss, batch, self._grad_output)
        for leaf in by_autograd:
            leaf.requires_grad_(False)
        return slopes, value

    def _check_same(self, reached: list[bool]) -> None:
        if self._reached not in (None, reached):
            raise ValueError(
                "a parameter has a gradient in some steps of a training and none in others, as where samples choose "
                "their way through a module, and Adam counts steps for all parameters at once here; choose "
                "training.optimizer: sgd"
            )
        self._reached = reached

    def _checked_leaves(self, direction: Tree) -> list[Tensor]:
        """Its leaves, in the order of those that are trained; `ValueError` where it is another tree than these."""
        slopes, leaves = dict(tree.leaves(direction)), dict(tree.leaves(self._trained))
        if slopes.keys() != leaves.keys() or any(slopes[path].shape != leaf.shape for path, leaf in leaves.items()):
            wrong = "; ".join(tree.differences(direction, self._trained)[:3])
            raise ValueError(f"the direction is another tree than what is trained: {wrong}")
        if not self._task.batched:
            return [slopes[path] for path in leaves]
        return [  # a constant is the same in all lanes
            slopes[path] if in_lane(slopes[path]) else slopes[path] + torch.zeros_like(leaf)
            for path, leaf in leaves.items()
        ]

    def count(self, batch: Batch) -> None:
        """Count a step that has been taken, maybe by replaying another."""
        if self._local is not None and self._loss_sum is not None:
            self._local.count(batch.active)

    def end(self) -> None:
        """Leave the optimizer's state to the next round, where it is kept."""
        if self._local is not None:
            self._local.end(self._phase.name, self._state)

    def _descend(self, slopes: Slopes, active: Tensor | None) -> None:
        """Move the leaves; not at all where `active` is 0, so that neither decay nor momentum goes on.

        All leaves move in one call: on a GPU a call for each costs more than its arithmetic.
        """
        moving = {place: slope for place, slope in enumerate(slopes) if slope is not None}
        leaves, moves = [self._leaves[place] for place in moving], [*moving.values()]
        momentum, decay, rate = self._momentum, self._decay, self._rate
        if self._task.batched:
            moves = [self._lane_slope(place, slope, active) for place, slope in moving.items()]
            if isinstance(rate, Tensor) and in_lane(rate):  # it differs by lane
                moves, rate = [rate * move for move in moves], 1.0
            assert all(lane_axis(tensor) >= 0 for tensor in (*leaves, *moves)), (
                "what trains, and its slope, differs by lane"
            )
            # Behind the lanes: vmap has no `_foreach` operations (PyTorch 2.14).
            leaves, moves = [*map(of_all_lanes, leaves)], [*map(of_all_lanes, moves)]
        elif moves:
            if decay:
                moves = list(torch._foreach_add(moves, leaves, alpha=decay))
            if momentum:
                velocity = [self._velocity[place] for place in moving]
                torch._foreach_mul_(velocity, momentum)
                torch._foreach_add_(velocity, moves)
                moves = velocity
        if not moves:
            return
        if isinstance(rate, Tensor):
            moves, rate = list(torch._foreach_mul(moves, rate)), 1.0
        # A trace has no alpha that is 1.
        torch._foreach_sub_(leaves, moves, **({} if rate == 1 else {"alpha": rate}))

    def _lane_slope(self, index: int, slope: Tensor, active: Tensor | None) -> Tensor:
        """Direction of a leaf, with decay and momentum; 0 where `active` is."""
        leaf, momentum, decay = self._leaves[index], self._momentum, self._decay
        if decay:
            slope = slope.add(leaf, alpha=decay) if active is None else slope + leaf * (active * decay)
        if momentum:
            velocity = self._velocity[index]
            velocity.mul_(momentum if active is None else 1 - active + active * momentum).add_(slope)
            slope = velocity if active is None else velocity * active
        return slope
