"""Adam, gradient clipping, and the state that an optimizer keeps from step to step."""

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.learning.training import TrainingConfig
from pflmpi.tree import Tree

Slopes = list[Tensor | None]  # the gradient of each leaf; None where the loss does not depend on it, as in PyTorch
Rate = float | Tensor  # a learning rate; a tensor [] where it differs between the clients of a call


def initial_state(training: TrainingConfig, trained: Tree) -> Tree:
    """Initial state of the configured optimizer for some parameters; `{}` for SGD without momentum."""
    if training.optimizer != "sgd":
        first = next(leaf for _, leaf in tree.leaves(trained))
        moments: Tree = {name: tree.map(torch.zeros_like, trained) for name in ("mean", "square")}
        return {**moments, "steps": torch.zeros_like(first.reshape(-1)[0])}  # one for each lane, in lanes
    return {"velocity": tree.map(torch.zeros_like, trained)} if training.momentum else {}


def clip(slopes: Slopes, norm: float) -> Slopes:
    """Gradients scaled down to a norm over all of them, where it is larger (as `torch.nn.utils.clip_grad_norm_`)."""
    squares = [slope.square().sum() for slope in slopes if slope is not None]
    if not squares:
        return slopes
    share = (norm / (torch.stack(squares).sum().sqrt() + 1e-6)).clamp(max=1)
    return [None if slope is None else slope * share for slope in slopes]


def adam_step(
    training: TrainingConfig, leaves: list[Tensor], slopes: Slopes, state: Tree, active: Tensor | None, lr: Rate
) -> None:
    """Take one step of Adam or AdamW, as PyTorch's, in place; `state` is the one of `initial_state`.

    Args:
        slopes: the gradient of each; one without stays as it is.
        active: 0 where nothing may change; None: 1.
    """
    real = 1.0 if active is None else active
    steps = tree.leaf(state, "steps").add_(real)
    # In float64: 1 - beta2 is small. The clamp is for clients that have not taken a step yet.
    exponent = steps.double().clamp(min=1)
    scale = (lr / (1 - training.beta1**exponent)).float() * real
    root = (1 - training.beta2**exponent).sqrt().float()
    mean, square = ([leaf for _, leaf in tree.leaves(tree.part(state, name))] for name in ("mean", "square"))
    for leaf, slope, first, second in zip(leaves, slopes, mean, square, strict=True):
        if slope is None:
            continue
        if training.weight_decay and training.optimizer == "adam":
            slope = slope + training.weight_decay * leaf
        elif training.weight_decay:
            leaf.mul_(1 - lr * training.weight_decay * real)
        first.add_((slope - first) * ((1 - training.beta1) * real))
        second.add_((slope.square() - second) * ((1 - training.beta2) * real))
        leaf.sub_(scale * first / (second.sqrt() / root + training.epsilon))
