"""Local training: the loop over minibatches, and single gradients and steps for algorithms with loops of their own.

Inside a vmapped call (`task.batched`) the same code trains many clients at once: batches are then padded, and a step
without a real sample changes nothing.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.learning.client import Batch, Loss, StepBatch, micro_batches
from pflmpi.learning.cuda_graphs import capture_on
from pflmpi.learning.optimizers import Gradients, Rate, adam_step, clip, init_optimizer_state
from pflmpi.learning.parts import has_path, overlay, remaining_paths, select_trained
from pflmpi.learning.replay import ReadsElsewhere, Steps, find_tensor_name, function_key
from pflmpi.learning.task import Task
from pflmpi.tree import Tree
from pflmpi.vmap_lanes import in_lane, lane_axis, of_all_lanes

_NOTHING: Tree = {}


@dataclass(frozen=True)
class Direction:
    """A replacement for the gradient, for training that does not follow the gradient of one loss.

    The configured optimizer takes it as the gradient. A step may then have several minibatches, as a tuple; see
    Per-FedAvg.

    Attributes:
        of: from (params, batch) to the direction, a tree of the trained parts, and a scalar, the reported loss. Like a
            loss it must read no other tensors.
    """

    of: Callable[[Tree, Any], tuple[Tree, Tensor]]


@dataclass(frozen=True)
class Phase:
    """One of the steps that `alternate` takes on every minibatch, in order.

    Attributes:
        loss: from (params, batch) to a scalar, or a direction; see `train`.
        parts: paths of the parameters that the step changes, such as "head" or "body/fc1".
        plain: plain SGD whatever is configured: no Adam, momentum, weight decay or clipping; its loss is not reported.
        limits: the interval to which values are clamped after the step.
        name: under which optimizer state is kept between rounds, and the loss is reported; see `Algorithm.trainings`.
    """

    loss: Loss | Direction
    parts: tuple[str, ...]
    lr: Rate
    plain: bool = False
    limits: tuple[float, float] | None = None
    name: str = "train"

    @property
    def function(self) -> Callable[..., Any]:
        """The loss function, or that of the direction."""
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
    depend stays as it is in that step, without decay or momentum, as in PyTorch; a direction has an entry for every
    leaf, and decay and momentum apply to all. Batch-norm statistics (`"stats"`) follow the forward passes.

    Args:
        params: a tree of named parts, such as a model.
        batches: the minibatches in order; one step each.
        loss: from (params, batch) to a scalar, or a direction. It must read no other tensors: a step is traced once in
            a run and replayed from then on (see `replay`).
        frozen: paths that are not trained, such as "head" or "body/fc1".
        name: of the training, if a client has several; see `Phase`.
        fixed: further tensors for the loss, as parts of its `params`; neither trained nor returned.
    """
    for path in frozen:
        if not has_path(params, path):
            raise ValueError(f"frozen names {path!r}, which the model does not have; its parts are {', '.join(params)}")
    parts = tuple(remaining_paths(params, ("stats", *frozen)))
    return alternate(task, params, batches, [Phase(loss, parts, lr, name=name)], fixed=fixed)


def alternate(
    task: Task, params: Tree, batches: Iterable[StepBatch], phases: Sequence[Phase], *, fixed: Tree = _NOTHING
) -> Tree:
    """The parameters after all phases on every batch; each phase sees the changes of the one before.

    Like `train`, with an optimizer for each phase.
    """
    _check_not_differentiated("`train` or `alternate`", params)
    if shared := params.keys() & fixed.keys():
        raise ValueError(f"`fixed` has {', '.join(sorted(shared))}, which the parameters have too; choose other names")
    faster = task.device.type == "cpu" or task.training.precision != "fp32"  # GPUs gain by it on tensor cores only
    channels_last = task.architecture.trains_channels_last and faster and not task.batched
    params = tree.map(_copy_channels_last, params) if channels_last else tree.clone(params)
    phase_steps = [PhaseStep(task, {**params, **fixed}, phase) for phase in phases]
    steps = _make_steps(task, phase_steps, params, fixed)
    for batch in batches:
        try:
            steps.take(batch)
        except ReadsElsewhere as error:
            raise ValueError(_explain_outside_tensor(error.tensor, phases)) from error
        for phase_step in phase_steps:
            phase_step.count(_first(batch))
    steps.end()
    for phase_step in phase_steps:
        phase_step.end()
    return tree.map(lambda leaf: leaf.detach().contiguous() if channels_last else leaf.detach(), params)


def _make_steps(task: Task, phase_steps: Sequence["PhaseStep"], params: Tree, fixed: Tree) -> Steps:
    """The steps of a pass, replayed if that is possible and worthwhile."""

    def step(batch: StepBatch) -> None:
        for phase_step in phase_steps:
            phase_step.step(batch)

    # On a CPU a step of one client is arithmetic: nothing is gained by replaying it.
    worthwhile = task.architecture.replays_steps and (task.batched or task.device.type != "cpu")
    kinds = [phase_step.kind for phase_step in phase_steps] if worthwhile else [None]
    if None in kinds:
        return Steps(step, None, (), 0, ())
    changed = [leaf for _, leaf in tree.leaves(params)]
    changed += [tensor for phase_step in phase_steps for tensor in phase_step.tensors]
    rates = tuple(rate for phase_step in phase_steps for rate in phase_step.rates)
    constant = [leaf for constants in (fixed, task.frozen.on(task.device)) for _, leaf in tree.leaves(constants)]
    return Steps(step, (task, *kinds), [*changed, *constant], len(changed), rates)


def _first(batch: StepBatch) -> Batch:
    """The minibatch that says whether a step has a real sample."""
    return batch[0] if isinstance(batch, tuple) else batch


def _explain_outside_tensor(tensor: Tensor, phases: Sequence[Phase]) -> str:
    name = next(filter(None, (find_tensor_name(tensor, phase.function) for phase in phases)), "")
    described, key = (f"the tensor {name!r}", name) if name else ("a tensor", "NAME")
    return (
        f"the loss reads {described} of shape {tuple(tensor.shape)} that is in neither its parameters nor its batch; "
        f"give it to `train` or `alternate` as fixed={{{key!r}: ...}}, and read params[{key!r}]"
    )


def gradient(task: Task, params: Tree, loss: Loss, batch: Batch, parts: tuple[str, ...]) -> tuple[Tree, Tensor]:
    """The gradient of a loss with respect to some parts of the parameters, and its value; 0 for padding alone.

    Both are constants, without second derivatives; a leaf on which the loss does not depend gets zeros. The parameters
    are not changed, but batch-norm statistics in `params["stats"]` follow the forward pass in place.

    Raises:
        ValueError: the parameters are being differentiated, as in a loss; there `torch.func.grad` is right.
    """
    _check_not_differentiated("`gradient`", params)
    weights = tree.map(Tensor.detach, select_trained(params, parts))
    if not task.batched:
        weights = tree.map(lambda leaf: leaf.clone().requires_grad_(True), weights)
    grads, value = gradients(task, overlay(params, weights), weights, loss, batch)
    remaining = iter(grads)

    def gradient_or_zeros(leaf: Tensor) -> Tensor:
        grad = next(remaining)
        return torch.zeros_like(leaf) if grad is None else grad

    return tree.map(gradient_or_zeros, weights), value.detach()


def _check_not_differentiated(function: str, params: Tree) -> None:
    """Raises `ValueError` inside a loss whose gradient should also flow through the result of a function."""
    path = next((path for path, leaf in tree.leaves(params) if leaf.requires_grad), None)
    if path is not None:
        raise ValueError(
            f"{function} was given {path!r}, which requires a gradient, as in a loss, and no gradient flows through "
            "its result; use torch.func.grad, or, where a constant is meant, give it "
            "tree.map(torch.Tensor.detach, params)"
        )


def step(params: Tree, gradient: Tree, lr: Rate) -> Tree:
    """params - lr gradient, for the parts that the gradient has; the other parts stay."""
    return overlay(params, tree.map(lambda grad, leaf: leaf - lr * grad, gradient, params))


def until(
    task: Task,
    state: Tree,
    passes: Iterable[Iterable[Batch]],
    once: Callable[[Tree, Iterable[Batch]], tuple[Tree, Tensor]],
    converged: Callable[[list[Tensor]], Tensor],
) -> Tree:
    """The state after passes until convergence, or after all of them.

    Args:
        passes: empty ones may follow at the end.
        once: from (state, pass) to the new state and a value, such as a loss.
        converged: from the values so far to a boolean tensor, whether to stop.
    """
    values: list[Tensor] = []
    stopped: Tensor | None = None
    for batches in passes:
        new, value = once(state, batches)
        values.append(value)
        state = new if stopped is None else _where(stopped, state, new)
        stopped = converged(values) if stopped is None else stopped | converged(values)
        if not task.batched and bool(stopped):  # lanes continue together; a converged one no longer changes
            break
    return state


def _copy_channels_last(leaf: Tensor) -> Tensor:
    """A copy, in channels-last layout if it has four axes, as the weights of a convolution do."""
    return leaf.clone(memory_format=torch.channels_last if leaf.dim() == 4 else torch.contiguous_format)


def _where(condition: Tensor, state: Tree, other: Tree) -> Tree:
    return tree.map(lambda leaf, new: torch.where(condition, leaf, new), state, other)


def gradients(
    task: Task, params: Tree, trained: Tree, loss: Loss, batch: Batch, grad_output: Tensor | None = None
) -> tuple[Gradients, Tensor]:
    """The gradient of each leaf, and the loss; accumulated over micro batches if the batch is larger than one.

    Args:
        trained: the leaves, which `params` has too; outside a vmapped call they require a gradient.
        grad_output: of the loss, by `unit_grad_output`; None: a new one.
    """
    size = task.training.micro_batch
    if size is None or len(batch.y) <= size:
        return _micro_batch_gradients(task, params, trained, loss, batch, grad_output)
    grads: Gradients = [None for _ in tree.leaves(trained)]
    values: list[Tensor] = []
    for micro_batch, weight in micro_batches(batch, size):

        def weighted_loss(params: Tree, micro_batch: Batch, weight: Tensor | float = weight) -> Tensor:
            return weight * _check_scalar(loss(params, micro_batch))

        more, value = _micro_batch_gradients(task, params, trained, weighted_loss, micro_batch, grad_output)
        grads = [*map(_add_gradients, grads, more)]
        values.append(value.detach())
    return grads, functools.reduce(torch.add, values)


def _add_gradients(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _micro_batch_gradients(
    task: Task, params: Tree, trained: Tree, loss: Loss, batch: Batch, grad_output: Tensor | None
) -> tuple[Gradients, Tensor]:
    if task.architecture.draws_noise and batch.key is not None:
        params = {**params, "noise": {"key": batch.key}}  # for `Architecture.noise_key`
    if task.batched:
        return _lane_gradients(params, trained, loss, batch, grad_output)
    leaves = [leaf for _, leaf in tree.leaves(trained)]
    value = _check_scalar(loss(params, batch))
    grads = torch.autograd.grad(value, leaves, _grad_output_for(value, grad_output), allow_unused=True)
    return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads], value


def unit_grad_output(like: Tensor) -> Tensor | None:
    """Reusable scalar `grad_outputs`, which saves an operation of every step; None on a CPU.

    There, passing it would import PyTorch's compiler, a second or two of processor time.

    Args:
        like: a trained leaf, which differs between lanes if there are any.
    """
    return None if like.device.type == "cpu" else torch.ones_like(like.detach().reshape(-1)[0])


def _check_scalar(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim:
        described = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise ValueError(
            f"the loss has {described}; expected a scalar tensor, such as cross_entropy(scores, batch), or "
            "average(values, batch) of values [B]"
        )
    return loss


def _grad_output_for(loss: Tensor, grad_output: Tensor | None) -> Tensor | None:
    """`grad_outputs` for a loss; None on a CPU, see `unit_grad_output`."""
    if loss.device.type == "cpu":
        return None
    return torch.ones_like(loss) if grad_output is None or grad_output.dtype != loss.dtype else grad_output


def _lane_gradients(
    params: Tree, trained: Tree, loss: Loss, batch: Batch, grad_output: Tensor | None
) -> tuple[Gradients, Tensor]:
    leaves = [leaf for _, leaf in tree.leaves(trained)]
    reached: list[int] = []  # indices of the leaves with a gradient

    def loss_and_gradients(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        remaining, padding = iter(leaves), batch.padding
        value = _check_scalar(loss(overlay(params, tree.map(lambda _: next(remaining), trained)), batch))
        if padding is not None and padding.active is not None:
            value = padding.active * value  # a step of padding alone has no gradient, not even of a proximal term
        grads = torch.autograd.grad(value, leaves, _grad_output_for(value, grad_output), allow_unused=True)
        reached[:] = [index for index, grad in enumerate(grads) if grad is not None]
        return value, [grad for grad in grads if grad is not None]

    # On a list, not a tree: torch.func walks nested dicts several times, which costs as much as a small model. Not
    # `torch.func.grad`, which keeps everything for second derivatives; calling the pullback would import sympy.
    value, _, reached_grads = torch.func.vjp(loss_and_gradients, leaves, has_aux=True)  # type: ignore[misc]
    grads: Gradients = [None] * len(leaves)
    for index, grad in zip(reached, reached_grads, strict=True):
        grads[index] = grad
    return grads, value


class PhaseStep:
    """Takes the steps of one phase, in place."""

    def __init__(self, task: Task, params: Tree, phase: Phase) -> None:
        self._task, self._params, self._phase = task, params, phase
        self._trained: Tree = select_trained(params, phase.parts)
        self._leaves = [leaf for _, leaf in tree.leaves(self._trained)]
        training = task.training
        self._momentum, self._decay = (0.0, 0.0) if phase.plain else (training.momentum, training.weight_decay)
        self._norm = None if phase.plain else training.clip_norm
        self._adam = training.optimizer != "sgd" and not phase.plain
        self._local = None if phase.plain else task.local
        self._loss_sum: Tensor | None = None
        self._reached: list[bool] | None = None  # which leaves have had a gradient in the steps so far
        self._grad_output = unit_grad_output(self._leaves[0])
        self._state: Tree = {} if phase.plain else init_optimizer_state(training, self._trained)
        if self._local is not None:
            self._state = self._local.begin(phase.name, self._state)
            self._loss_sum = self._local.loss_sum(phase.name, self._leaves[0])
        self._velocity = [leaf for _, leaf in tree.leaves(self._state)] if self._momentum else []
        self._rate = phase.lr
        if isinstance(self._rate, float) and capture_on(self._leaves[0].device):
            # A tensor, so that a captured step can have the learning rate of a later round.
            self._rate = torch.full((), self._rate, device=self._leaves[0].device)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of a step besides parameters and batch: those that it changes, then those that it only reads."""
        state = [leaf for _, leaf in tree.leaves(self._state)]
        candidates = (*state, self._loss_sum, self._grad_output, self._rate)
        return [tensor for tensor in candidates if isinstance(tensor, Tensor)]

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate if a traced step takes it as a number."""
        return () if self._adam or isinstance(self._rate, Tensor) or self._rate == 1 else (self._rate,)

    @property
    def kind(self) -> Hashable:
        """Key of a step's operations, besides the task and the layout of its tensors; None: unknown."""
        phase = self._phase
        function = function_key(phase.function)
        if function is None:
            return None
        rate: float | bool | None = None  # for a tensor, which is part of the state
        if not isinstance(self._rate, Tensor):
            rate = self._rate if self._adam else self._rate == 1  # see `_descend`
        return function, type(phase.loss), phase.parts, phase.plain, phase.limits, self._loss_sum is None, rate

    def step(self, batch: StepBatch) -> None:
        padding = _first(batch).padding
        active = None if padding is None else padding.active
        grads, loss = self._compute_gradients(batch, active)
        with torch.no_grad():
            if self._loss_sum is not None:
                self._loss_sum.add_(loss)
            if self._norm is not None:
                grads = clip(grads, self._norm)
            if self._adam:
                self._check_same_leaves([grad is not None for grad in grads])
                adam_step(self._task.training, self._leaves, grads, self._state, active, self._rate)
            else:
                self._descend(grads, active)
            if self._phase.limits is not None:
                for leaf in self._leaves:
                    leaf.copy_(leaf.clamp(*self._phase.limits))  # clamp_ is not batched by vmap (PyTorch 2.15)

    def _compute_gradients(self, batch: StepBatch, active: Tensor | None) -> tuple[Gradients, Tensor]:
        """The gradient or direction of each leaf, and the loss; all zero where `active` is."""
        loss = self._phase.loss
        if isinstance(loss, Direction):
            direction, value = loss.of(self._params, batch)
            grads = self._leaves_of(direction)
            if active is not None:
                grads, value = [active * grad for grad in grads], active * value
            return [*grads], _check_scalar(value).detach()
        if isinstance(batch, tuple):
            raise ValueError(
                f"a loss takes one minibatch, and a step was given {len(batch)}; give a Direction, which takes "
                "several, or one minibatch for each step"
            )
        by_autograd = () if self._task.batched else self._leaves
        for leaf in by_autograd:
            leaf.requires_grad_(True)
        result = gradients(self._task, self._params, self._trained, loss, batch, self._grad_output)
        for leaf in by_autograd:
            leaf.requires_grad_(False)
        return result

    def _check_same_leaves(self, reached: list[bool]) -> None:
        if self._reached not in (None, reached):
            raise ValueError(
                "a parameter has a gradient in some steps of a training and none in others, as where samples choose "
                "their way through a module, and Adam counts steps for all parameters at once here; choose "
                "training.optimizer: sgd"
            )
        self._reached = reached

    def _leaves_of(self, direction: Tree) -> list[Tensor]:
        """The leaves of a direction in the order of the trained leaves; raises `ValueError` if the trees differ."""
        grads, leaves = dict(tree.leaves(direction)), dict(tree.leaves(self._trained))
        if grads.keys() != leaves.keys() or any(grads[path].shape != leaf.shape for path, leaf in leaves.items()):
            differences = "; ".join(tree.differences(direction, self._trained)[:3])
            raise ValueError(f"the direction is another tree than what is trained: {differences}")
        if not self._task.batched:
            return [grads[path] for path in leaves]
        return [  # a constant gets a lane axis
            grads[path] if in_lane(grads[path]) else grads[path] + torch.zeros_like(leaf)
            for path, leaf in leaves.items()
        ]

    def count(self, batch: Batch) -> None:
        """Counts a step, taken or replayed."""
        if self._local is not None and self._loss_sum is not None:
            self._local.count(batch.active)

    def end(self) -> None:
        """Hands the optimizer's state over, to be kept for the next round."""
        if self._local is not None:
            self._local.end(self._phase.name, self._state)

    def _descend(self, grads: Gradients, active: Tensor | None) -> None:
        """Takes a step of SGD; where `active` is 0 nothing changes, neither by decay nor by momentum.

        All leaves are updated in one call: on a GPU a call for each costs more than its arithmetic.
        """
        reached = [index for index, grad in enumerate(grads) if grad is not None]
        leaves = [self._leaves[index] for index in reached]
        updates = [grad for grad in grads if grad is not None]
        rate = self._rate
        if not updates:
            return
        if self._task.batched:
            updates = [self._lane_update(*indexed, active) for indexed in zip(reached, updates, strict=True)]
            if isinstance(rate, Tensor) and in_lane(rate):  # it differs between lanes
                updates, rate = [rate * update for update in updates], 1.0
            if any(lane_axis(tensor) < 0 for tensor in (*leaves, *updates)):
                raise ValueError(
                    "parameters, or their gradients, are the same for all clients of a group, as those of task.init() "
                    "on a batch made by hand; train what depends on the client, or choose runtime.executor: loop"
                )
            # On the tensors of all lanes: vmap has no `_foreach` operations (PyTorch 2.14).
            leaves, updates = [*map(of_all_lanes, leaves)], [*map(of_all_lanes, updates)]
        else:
            if self._decay:
                updates = list(torch._foreach_add(updates, leaves, alpha=self._decay))
            if self._momentum:
                velocity = [self._velocity[index] for index in reached]
                torch._foreach_mul_(velocity, self._momentum)
                torch._foreach_add_(velocity, updates)
                updates = velocity
        if isinstance(rate, Tensor):
            updates, rate = list(torch._foreach_mul(updates, rate)), 1.0
        # A trace has no alpha that is 1.
        torch._foreach_sub_(leaves, updates, **({} if rate == 1 else {"alpha": rate}))

    def _lane_update(self, index: int, grad: Tensor, active: Tensor | None) -> Tensor:
        """The gradient of a leaf with decay and momentum; 0 where `active` is."""
        leaf, momentum, decay = self._leaves[index], self._momentum, self._decay
        if decay:
            grad = grad.add(leaf, alpha=decay) if active is None else grad + leaf * (active * decay)
        if momentum:
            velocity = self._velocity[index]
            velocity.mul_(momentum if active is None else 1 - active + active * momentum).add_(grad)
            grad = velocity if active is None else velocity * active
        return grad
