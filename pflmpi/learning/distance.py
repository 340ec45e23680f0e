"""The squared distance of two models, in as few operations as it can be differentiated with."""

from typing import Any

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.tree import Tree
from pflmpi.vmap_lanes import in_vmap


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """||a - b||^2 over all leaves of `b` (a may have more parts); its gradient is taken by `a`."""
    pairs = [(tree.at(a, path), leaf) for path, leaf in tree.leaves(b)]
    if in_vmap():  # there are no `_foreach` operations in lanes
        return torch.stack([(mine - other).square().sum() for mine, other in pairs]).sum()
    mine, others = zip(*pairs, strict=True)
    result: Tensor = _SquaredDistance.apply(others, *mine)
    return result


class _SquaredDistance(torch.autograd.Function):
    """The same of all leaves in a call each, with the bits of autograd's own formula.

    Autograd asks a GPU for seven operations a leaf, which for a deep network is more than its training.
    """

    @staticmethod
    def forward(ctx: Any, others: tuple[Tensor, ...], *mine: Tensor) -> Tensor:
        """The distance."""
        apart = torch._foreach_sub(mine, others)
        ctx.save_for_backward(*apart)
        return torch.stack([square.sum() for square in torch._foreach_mul(apart, apart)]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        """The gradient by each leaf: twice the difference."""
        return None, *torch._foreach_mul(torch._foreach_mul(ctx.saved_tensors, 2.0), slope)
