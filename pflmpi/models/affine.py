"""A fully connected layer, for one client or in a lane."""

from torch import Tensor
from torch.nn import functional as F

from pflmpi.tree import Tree, leaf
from pflmpi.vmap_lanes import in_lane


def affine(layer: Tree, x: Tensor) -> Tensor:
    """x W^T + b, [B, d'], for x: [B, d] and a layer with "weight" [d', d] and "bias" [d']."""
    weight, bias = leaf(layer, "weight"), leaf(layer, "bias")
    if not in_lane(weight):
        return F.linear(x, weight, bias)
    # The same bits without the product of bias and one that `linear` has in a vmapped call (PyTorch 2.14).
    product = x @ weight.mT
    return product + bias.to(product.dtype)
