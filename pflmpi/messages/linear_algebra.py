"""The arithmetic of models that are compared and mixed, in float64."""

from torch import Tensor

from pflmpi import tree


def inner_products(rows: Tensor, from_first: bool) -> Tensor:
    """Inner products [P, P] (float64) of the rows [P, ...] of a leaf, less the first row where asked for."""
    flat = tree.flat_rows(rows).double()
    if from_first:
        flat = flat - flat[:1]
    return flat @ flat.mT


def weighted_sums(weights: Tensor, rows: Tensor) -> Tensor:
    """Weights [Q, P] (float64) times rows [P, ...]: [Q, ...] of the type of the rows."""
    return (weights @ tree.flat_rows(rows).double()).to(rows.dtype).view(len(weights), *rows.shape[1:])
