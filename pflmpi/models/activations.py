"""What the layers of a model put out for a batch of images."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pflmpi import tree
from pflmpi.models.base import Architecture
from pflmpi.tree import Tree, part


def activations(architecture: Architecture, model: Tree, x: Tensor, see: Callable[[str, Tensor], None]) -> None:
    """Send a batch through a model as it predicts, and show the output of each of its layers as it comes.

    Args:
        architecture: of the model.
        model: its weights, on the device of x.
        x: prepared images, [B, C, H, W].
        see: is called with a layer of `architecture.layers` and what it puts out, [B, ...], before a nonlinearity.
    """
    weights = {layer: tree.at(model, f"{layer}/weight") for layer in architecture.layers}
    with torch.no_grad(), _Watching(weights.items(), see):
        architecture.logits(part(model, "head"), architecture.features(model, x, training=False))


class _Watching(TorchFunctionMode):
    """While it is entered, notices the calls that have a layer's weight among their arguments, after the input."""

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
