"""Layers: initial weights from PyTorch's distributions, drawn from a NumPy generator; the fully connected layer."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pflmpi.tree import Tree, leaf
from pflmpi.vmap_lanes import in_lane


def uniform(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> Tensor:
    """Draws a tensor from U(-b, b) with b = 1 / sqrt(fan_in).

    PyTorch's layers start with this: `kaiming_uniform_` with a = sqrt(5) has b = sqrt(6 / ((1 + a^2) fan_in)).
    """
    values = rng.random(shape, dtype=np.float32)
    values *= 2
    values -= 1  # exact, so that no value is outside the bound
    values *= np.float32(1 / math.sqrt(fan_in))
    return torch.from_numpy(values)


def linear(rng: np.random.Generator, inputs: int, outputs: int) -> Tree:
    """Returns `{"weight": [outputs, inputs], "bias": [outputs]}`, initialised like `nn.Linear`."""
    return {"weight": uniform(rng, (outputs, inputs), inputs), "bias": uniform(rng, (outputs,), inputs)}


def conv(rng: np.random.Generator, inputs: int, outputs: int, kernel: int) -> Tree:
    """Returns `{"weight": [outputs, inputs, kernel, kernel], "bias": [outputs]}`, initialised like `nn.Conv2d`."""
    fan_in = inputs * kernel * kernel
    return {
        "weight": uniform(rng, (outputs, inputs, kernel, kernel), fan_in),
        "bias": uniform(rng, (outputs,), fan_in),
    }


def kaiming_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Draws a convolution weight [outputs, inputs, height, width] from N(0, 2 / fan_out), as in ResNets."""
    fan_out = shape[0] * math.prod(shape[2:])
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= np.float32(math.sqrt(2 / fan_out))
    return torch.from_numpy(values)


def affine(layer: Tree, x: Tensor) -> Tensor:
    """x W^T + b, [B, d'], for x: [B, d] and a layer with "weight" [d', d] and "bias" [d']."""
    weight, bias = leaf(layer, "weight"), leaf(layer, "bias")
    if not in_lane(weight):
        return F.linear(x, weight, bias)
    # In a vmapped call `linear` multiplies the bias by one (PyTorch 2.14); this gives the same bits without that.
    product = x @ weight.mT
    return product + bias.to(product.dtype)
