"""Adam, gradient clipping, and the state that an optimizer keeps from step to step."""

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.learning.training import TrainingConfig
from pflmpi.tree import Tree

Gradients = list[Tensor | None]  # of each leaf; None where the loss does not depend on it, as in PyTorch
Rate = float | Tensor  # a learning rate; a tensor [] where it differs between the clients of a call


def init_optimizer_state(training: TrainingConfig, trained: Tree) -> Tree:
    """Initial state of the configured optimizer for some parameters; `{}` for SGD without momentum."""
    if training.optimizer != "sgd":
        first = next(leaf for _, leaf in tree.leaves(trained))
        moments: Tree = {name: tree.map(torch.zeros_like, trained) for name in ("mean", "square")}
        return {**moments, "steps": torch.zeros_like(first.reshape(-1)[0])}  # in lanes, one per lane
    return {"velocity": tree.map(torch.zeros_like, trained)} if training.momentum else {}


def clip(grads: Gradients, norm: float) -> Gradients:
    """Gradients scaled down to a norm over all of them if it is larger, as by `torch.nn.utils.clip_grad_norm_`."""
    squares = [grad.square().sum() for grad in grads if grad is not None]
    if not squares:
        return grads
    scale = (norm / (torch.stack(squares).sum().sqrt() + 1e-6)).clamp(max=1)
    return [None if grad is None else grad * scale for grad in grads]


def adam_step(
    training: TrainingConfig, leaves: list[Tensor], grads: Gradients, state: Tree, active: Tensor | None, lr: Rate
) -> None:
    """Takes one step of PyTorch's Adam or AdamW, in place.

    Args:
        grads: the gradient of each leaf; a leaf without one stays as it is.
        state: in the form of `init_optimizer_state`.
        active: 0 where nothing may change; None: 1.
    """
    real = 1.0 if active is None else active
    steps = tree.leaf(state, "steps").add_(real)
    # In float64: 1 - beta2 is small. The clamp is for clients that have not taken a step yet.
    exponent = steps.double().clamp(min=1)
    scale = (lr / (1 - training.beta1**exponent)).float() * real
    root = (1 - training.beta2**exponent).sqrt().float()
    means, squares = ([leaf for _, leaf in tree.leaves(tree.part(state, name))] for name in ("mean", "square"))
    for leaf, grad, mean, square in zip(leaves, grads, means, squares, strict=True):
        if grad is None:
            continue
        if training.weight_decay and training.optimizer == "adam":
            grad = grad + training.weight_decay * leaf
        elif training.weight_decay:
            leaf.mul_(1 - lr * training.weight_decay * real)
        mean.add_((grad - mean) * ((1 - training.beta1) * real))
        square.add_((grad.square() - square) * ((1 - training.beta2) * real))
        leaf.sub_(scale * mean / (square.sqrt() / root + training.epsilon))
