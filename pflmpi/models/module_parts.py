"""The parts of a torch module that a run treats its own way: dropout, batch norm, names of weights and statistics."""

import math

import torch
from torch import Tensor, nn

from pflmpi import tree
from pflmpi.models.noise import dropped
from pflmpi.tree import Tree

_GROUPS = 32


class KeyedDropout(nn.Module):
    """Dropout whose mask follows from a key, which is a buffer: the same bits wherever it runs."""

    key: Tensor

    def __init__(self, p: float, number: int) -> None:
        super().__init__()
        self.p, self.number = p, number
        self.register_buffer("key", torch.tensor(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x with entries dropped with probability p while training, the others scaled by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return x
        return dropped(x, self.key, self.p, self.number)


def prepare(module: nn.Module, norm: str) -> None:
    """Replace dropout, drop counters of batch norm, and replace it by group norm if `norm` is "group"; in place."""
    number = 0
    for name, layer in list(module.named_modules()):
        if type(layer) is nn.Dropout:
            module.set_submodule(name, KeyedDropout(layer.p, number))
            number += 1
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.num_batches_tracked = None  # not needed: the running averages have a constant momentum
            if norm == "group":
                channels = layer.num_features
                module.set_submodule(name, nn.GroupNorm(math.gcd(channels, _GROUPS), channels, layer.eps))


def key_dropout(module: nn.Module, key: Tensor) -> dict[str, Tensor]:
    """The keys of a module's dropout layers as buffers by name."""
    return {f"{name}.key": key for name, layer in module.named_modules() if isinstance(layer, KeyedDropout)}


def split(module: nn.Module) -> Tree:
    """The body, and the statistics if there are any, of a module without its head."""
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    keys = key_dropout(module, torch.tensor(0))
    stats = {name: value.detach().clone() for name, value in module.named_buffers() if name not in keys}
    return {"body": _nested(weights), **({"stats": _nested(stats)} if stats else {})}


def _nested(flat: dict[str, Tensor]) -> Tree:
    return tree.unflatten({name.replace(".", "/"): value for name, value in flat.items()})
