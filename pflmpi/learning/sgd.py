"""Training: the only loop over minibatches that changes parameters, and its single step for algorithms with their own.

Inside a vmapped call (`task.batched`) the same code trains many clients at once: batches are then padded, and a step
without a real sample changes nothing.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.learning.client import Batch, Loss
from pflmpi.learning.optimizers import Rate
from pflmpi.learning.parts import has, others, overlay, trained
from pflmpi.learning.replay import ReadsElsewhere, Steps, name_of
from pflmpi.learning.steps import Phase as Phase
from pflmpi.learning.steps import PhaseStep, gradients
from pflmpi.learning.task import Task
from pflmpi.tree import Tree

_NOTHING: Tree = {}


def train(
    task: Task,
    params: Tree,
    batches: Iterable[Batch],
    loss: Loss,
    lr: Rate,
    *,
    frozen: tuple[str, ...] = (),
    name: str = "train",
    fixed: Tree = _NOTHING,
) -> Tree:
    """The parameters after the configured optimizer's steps over the batches; the argument is not changed.

    SGD is PyTorch's (v = m v + g + w p, p = p - lr v), as are Adam and AdamW; momentum and moments start at zero, or,
    with `training.keep_optimizer`, as the client's last round left them. Batch-norm statistics (`"stats"`) follow the
    forward passes.

    Args:
        params: a tree of named parts, such as a model.
        batches: the minibatches in order; one step each.
        loss: from (params, batch) to a scalar. It reads no tensor from elsewhere: a step is traced once in a run
            and replayed from then on (see `replay`).
        lr: learning rate.
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
    task: Task, params: Tree, batches: Iterable[Batch], phases: Sequence[Phase], *, fixed: Tree = _NOTHING
) -> Tree:
    """The parameters after all phases on every batch; a phase sees what the one before it has changed.

    As `train`, with an optimizer for each phase.
    """
    channels_last = task.architecture.trains_channels_last and task.device.type == "cpu" and not task.batched
    params = tree.map(_copy_channels_last, params) if channels_last else tree.clone(params)
    if twice := params.keys() & fixed.keys():
        raise ValueError(f"`fixed` has {', '.join(sorted(twice))}, which the parameters have too; choose other names")
    movers = [PhaseStep(task, {**params, **fixed}, phase) for phase in phases]

    def step(batch: Batch) -> None:
        for mover in movers:
            mover.step(batch)

    steps = _steps(task, step, movers, params, fixed)
    for batch in batches:
        try:
            steps.take(batch)
        except ReadsElsewhere as error:
            raise ValueError(_elsewhere(error.tensor, phases)) from error
        for mover in movers:
            mover.count(batch)
    steps.end()
    for mover in movers:
        mover.end()
    return tree.map(lambda leaf: leaf.detach().contiguous() if channels_last else leaf.detach(), params)


def _steps(task: Task, step: Callable[[Batch], None], movers: Sequence[PhaseStep], params: Tree, fixed: Tree) -> Steps:
    """The steps of a pass, replayed where that is possible and worth it."""
    kinds = [mover.kind for mover in movers]
    # On a CPU a step of one client is arithmetic: nothing is gained by replaying it.
    worth = task.architecture.replays_steps and (task.batched or task.device.type != "cpu")
    if None in kinds or not worth:
        return Steps(step, None, (), 0, ())
    changed = [leaf for _, leaf in tree.leaves(params)] + [tensor for mover in movers for tensor in mover.tensors]
    rates = tuple(rate for mover in movers for rate in mover.rates)
    read = [leaf for _, leaf in tree.leaves(fixed)]
    return Steps(step, (task, *kinds), [*changed, *read], len(changed), rates)


def _elsewhere(tensor: Tensor, phases: Sequence[Phase]) -> str:
    name = next(filter(None, (name_of(tensor, phase.loss) for phase in phases)), "")
    what, key = (f"the tensor {name!r}", name) if name else ("a tensor", "NAME")
    return (
        f"the loss reads {what} of shape {tuple(tensor.shape)} that is in neither its parameters nor its batch; give "
        f"it to `train` or `alternate` as fixed={{{key!r}: ...}}, and read params[{key!r}]"
    )


def gradient(
    task: Task, params: Tree, loss: Loss, batch: Batch, parts: tuple[str, ...], *, counts_as: str = ""
) -> Tree:
    """The gradient of a loss by some parts of the parameters; zero for a batch of padding alone.

    The parameters are not changed, but batch-norm statistics in `params["stats"]` follow the forward pass in place.
    The loss counts as that of a step of the training `counts_as`; nowhere where that is "".
    """
    weights = tree.map(Tensor.detach, trained(params, parts))
    if not task.batched:
        weights = tree.map(lambda leaf: leaf.clone().requires_grad_(True), weights)
    slopes, value = gradients(task, overlay(params, weights), weights, loss, batch)
    if counts_as and task.local is not None and (total := task.local.loss_sum(counts_as, value)) is not None:
        total.add_(value.detach())
        task.local.count(batch.active)
    values = iter(slopes)
    return tree.map(lambda _: next(values), weights)


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
