"""Distances, cosines and weighted sums of models, computed leaf by leaf in float64."""

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.tree import Tree


def inner_products(rows: Tensor, from_first: bool = False) -> Tensor:
    """Inner products [P, P] (float64) of the rows [P, ...] of a leaf.

    Args:
        from_first: subtract the first row from all, so that distances of similar models do not cancel.
    """
    flat = tree.flat_rows(rows).double()
    if from_first:
        flat = flat - flat[:1]
    return flat @ flat.mT


def weighted_sums(weights: Tensor, rows: Tensor) -> Tensor:
    """Weights [Q, P] (float64) times the rows of a leaf [P, ...]: [Q, ...] of the type of the rows."""
    return (weights @ tree.flat_rows(rows).double()).to(rows.dtype).view(len(weights), *rows.shape[1:])


def squared_distances(products: Tree, others: Tensor | slice = slice(None)) -> Tensor:
    """||w_i - w_j||^2 over all leaves (float64), from the inner products [P, P] of each; 0 on the diagonal.

    Args:
        others: indices [K] of the models w_j; all by default.

    Returns:
        [P, P], or [P, K].
    """
    norms = _sum_leaves(tree.map(Tensor.diagonal, products))
    gram = _sum_leaves(tree.map(lambda product: product[:, others], products))
    return (norms.unsqueeze(1) + norms[others] - 2 * gram).clamp(min=0)


def cosines(products: Tree) -> Tensor:
    """cos(w_i, w_j) over all leaves, [P, P] (float64), from the inner products of each; 0 for a model of zeros."""
    gram = _sum_leaves(products)
    norms = gram.diagonal().sqrt()
    return gram / (norms.unsqueeze(1) * norms).clamp(min=torch.finfo(gram.dtype).tiny)


def attention(distances: Tensor, alpha: float, sigma: float) -> Tensor:
    """alpha A'(distances) for A(x) = 1 - exp(-x / sigma), with 0 on the diagonal; [P, P]."""
    weights = alpha * torch.exp(-distances / sigma) / sigma
    return weights - torch.diag(weights.diagonal())


def _sum_leaves(products: Tree) -> Tensor:
    return torch.stack([leaf for _, leaf in tree.leaves(products)]).sum(0)
