"""A model as an ordinary torch module, which an exported state dict loads into."""

import numpy as np
from torch import Tensor, nn

from pflmpi import tree
from pflmpi.models.base import Architecture
from pflmpi.module_names import module_names
from pflmpi.tree import Tree, part


class ModelModule(nn.Module):
    """An architecture with its own weights under plain names: "conv1.weight", "head.bias"; ResNets as in torchvision.

    The weights start as zeros: load a state dict.

    >>> from pflmpi.models import MODELS
    >>> module = ModelModule(MODELS["mlp"](hidden=3).bind((1, 8, 8), 10))
    >>> sorted(module.state_dict())
    ['fc1.bias', 'fc1.weight', 'head.bias', 'head.weight']
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self._architecture = architecture
        weights = dict(tree.leaves(architecture.init(np.random.default_rng(0))))
        self._names = module_names(weights)
        for path, name in self._names.items():
            parent, _, last = name.rpartition(".")
            owner = _owner(self, parent)
            value = weights[path].zero_()
            if path.startswith("stats/"):
                owner.register_buffer(last, value)
            else:
                owner.register_parameter(last, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scores [B, K] of images x [B, C, H, W], prepared as in training.

        With `data.normalize: fixed` bytes become x / 127.5 - 1.
        """
        values = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        model: Tree = tree.unflatten({path: values[name] for path, name in self._names.items()})
        features = self._architecture.features(model, x, self.training)
        return self._architecture.logits(part(model, "head"), features)


def _owner(module: nn.Module, name: str) -> nn.Module:
    """Returns the submodule of a dotted name, created if missing."""
    for part_name in filter(None, name.split(".")):
        if part_name not in module._modules:
            module.add_module(part_name, nn.Module())
        module = module.get_submodule(part_name)
    return module
