"""Small networks that condition features: the valve of GPFL and the gate of FedCP."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pflmpi.models.layers import linear
from pflmpi.tree import Tree, leaf, part


def init_valve(rng: np.random.Generator, num_features: int) -> Tree:
    """Initial weights of a valve by PyTorch's default initialisation, for features of width d."""
    return {name: _init_layer(rng, num_features, num_features) for name in ("scale", "shift")}


def valve(weights: Tree, z: Tensor, condition: Tensor) -> Tensor:
    """relu(z * (gamma(c) + 1) + beta(c)), [B, d], where gamma and beta are each Linear, ReLU, LayerNorm.

    Args:
        weights: as `init_valve` returns them; "scale" is gamma, "shift" beta.
        z: [B, d].
        condition: [d], c.
    """
    scale, shift = (
        _norm(part(weights, name), F.relu(_linear(part(weights, name), condition))) for name in ("scale", "shift")
    )
    return F.relu(z * (scale + 1) + shift)


def init_gate(rng: np.random.Generator, num_features: int) -> Tree:
    """Initial weights of a gate by PyTorch's default initialisation, for features of width d."""
    return _init_layer(rng, num_features, 2 * num_features)


def gate(weights: Tree, z: Tensor, uniform: Tensor | None = None) -> Tensor:
    """The share of each feature that is personal, [B, d] in 0..1; the rest is global.

    Linear(d -> 2 d), LayerNorm, ReLU give two scores a, b for each feature. Their softmax is sigmoid(a - b); with noise
    it is the Gumbel-softmax of temperature 1, sigmoid(a - b + log u - log(1 - u)), as the difference of two Gumbel
    variables is a logistic one.

    Args:
        weights: as `init_gate` returns them.
        z: [B, d].
        uniform: [B, d] noise u between 0 and 1; None: without.
    """
    personal, shared = F.relu(_norm(weights, _linear(weights, z))).chunk(2, -1)
    noise = 0 if uniform is None else uniform.log() - (1 - uniform).log()
    return (personal - shared + noise).sigmoid()


def _init_layer(rng: np.random.Generator, inputs: int, outputs: int) -> Tree:
    return {
        "linear": linear(rng, inputs, outputs),
        "norm": {"weight": torch.ones(outputs), "bias": torch.zeros(outputs)},
    }


def _linear(layer: Tree, x: Tensor) -> Tensor:
    weights = part(layer, "linear")
    return F.linear(x, leaf(weights, "weight"), leaf(weights, "bias"))


def _norm(layer: Tree, x: Tensor) -> Tensor:
    weights = part(layer, "norm")
    return F.layer_norm(x, x.shape[-1:], leaf(weights, "weight"), leaf(weights, "bias"))
