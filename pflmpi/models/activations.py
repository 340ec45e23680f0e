"""Layer outputs of a model for a batch of images."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pflmpi import tree
from pflmpi.models.base import Architecture
from pflmpi.tree import Tree, part


def activations(architecture: Architecture, model: Tree, x: Tensor, see: Callable[[str, Tensor], None]) -> None:
    """Run a model's prediction on a batch and pass each layer's output to `see`, in order.

    Args:
        model: weights of the architecture, on the device of x.
        x: prepared images, [B, C, H, W].
        see: called with a layer of `architecture.layers` that has a "weight" and its output [B, ...], before any
            nonlinearity.
    """
    leaves = dict(tree.leaves(model))
    weights = [(layer, leaves[path]) for layer in architecture.layers if (path := f"{layer}/weight") in leaves]
    with torch.no_grad(), _LayerOutputs(weights, see):
        architecture.logits(part(model, "head"), architecture.features(model, x, training=False))


class _LayerOutputs(TorchFunctionMode):
    """While active, reports the results of calls that take a layer's weight as an argument after the input."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], see: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._layers = {id(weight): layer for layer, weight in weights}
        self._see = see

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = kwargs or {}
        result = function(*args, **others)
        for argument in (*args[1:], *others.values()):
            if id(argument) in self._layers:
                self._see(self._layers[id(argument)], result)
        return result
