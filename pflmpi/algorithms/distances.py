"""How far apart uploaded models are, and their weighted sums: matrix products in float64."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.tree import Tree


def squared_distances(models: Tree) -> Tensor:
    """||w_i - w_j||^2 over all leaves, [P, P] (float64), for models with rows [P, ...]; 0 on the diagonal."""
    # Relative to the first, so that the Gram matrix does not cancel when all models are near each other.
    gram = _gram(rows - rows[:1] for rows in _flat(models))
    norms = gram.diagonal()
    return (norms.unsqueeze(1) + norms - 2 * gram).clamp(min=0)


def cosines(models: Tree) -> Tensor:
    """cos(w_i, w_j) over all leaves, [P, P] (float64), for models with rows [P, ...]; 0 for a model of zeros."""
    gram = _gram(_flat(models))
    norms = gram.diagonal().sqrt()
    return gram / (norms.unsqueeze(1) * norms).clamp(min=torch.finfo(gram.dtype).tiny)


def attention(distances: Tensor, alpha: float, sigma: float) -> Tensor:
    """alpha A'(distances) for A(x) = 1 - exp(-x / sigma), with 0 on the diagonal; [P, P]."""
    messages = alpha * torch.exp(-distances / sigma) / sigma
    return messages - torch.diag(messages.diagonal())


def mix(weights: Tensor, rows: Tensor) -> Tensor:
    """Weights [Q, P] (float64) times rows [P, ...], as float32 [Q, ...]."""
    return (weights @ tree.flat_rows(rows).double()).float().view(len(weights), *rows.shape[1:])


def mean_for_each(rows: Tree, count: int) -> Tree:
    """The plain mean of rows [P, ...], once for each of `count` clients: [count, ...]."""
    return tree.map(lambda leaf: leaf.double().mean(0).float().expand(count, *leaf.shape[1:]).clone(), rows)


def _flat(models: Tree) -> Iterable[Tensor]:
    return (tree.flat_rows(rows).double() for _, rows in tree.leaves(models))


def _gram(flat: Iterable[Tensor]) -> Tensor:
    return torch.stack([rows @ rows.mT for rows in flat]).sum(0)
