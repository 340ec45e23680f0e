"""The parts of a torch module that a run treats its own way: dropout, batch norm, names of weights and statistics."""

import math

import torch
from torch import Tensor, nn

from pflmpi import tree
from pflmpi.errors import ConfigError
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
    """Replace dropout, drop counters of batch norm, and replace it by group norm if `norm` is "group"; in place.

    Raises:
        ConfigError: a layer would draw from the global generator of random numbers.
    """
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
        elif cure := _without_draws(layer):
            raise ConfigError(
                f"{name} of the module, an nn.{type(layer).__name__}, draws from the global generator of random "
                f"numbers, so that a run could not be repeated; {cure}"
            )


def _without_draws(layer: nn.Module) -> str:
    """What to do with a layer that draws random numbers while it is trained; nothing with others."""
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.dropout > 0:
        return "set its dropout to 0; the masks of nn.Dropout around it follow from the seed"
    if isinstance(layer, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return "choose another layer"
    if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
        return "use nn.Dropout, whose masks follow from the seed"
    return ""


def key_dropout(module: nn.Module, key: Tensor) -> dict[str, Tensor]:
    """The keys of a module's dropout layers as buffers by name."""
    return {f"{name}.key": key for name, layer in module.named_modules() if isinstance(layer, KeyedDropout)}


def split(module: nn.Module) -> Tree:
    """The body, and the statistics if there are any, of a module without its head."""
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    keys = key_dropout(module, torch.tensor(0))
    stats = {name: value.detach().clone() for name, value in module.named_buffers() if name not in keys}
    return {"body": nested(weights), **({"stats": nested(stats)} if stats else {})}


def flat(values: Tree) -> dict[str, Tensor]:
    """The tensors of a tree by the names that they have in a module."""
    return {path.replace("/", "."): value for path, value in tree.leaves(values)}


def nested(flat: dict[str, Tensor]) -> Tree:
    """The tree of tensors that have these names in a module."""
    return tree.unflatten({name.replace(".", "/"): value for name, value in flat.items()})
