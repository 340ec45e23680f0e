"""Personal adapters on a frozen network: trained together once, then every client has a low-rank change of its own.

    pflmpi run examples/adapters.yaml --out runs/backbone -s "model={name: examples/adapters.py:Net, head: head}" -s "algorithm={name: fedavg}"
    pflmpi export runs/backbone --client 0 -o examples/backbone.pt
    pflmpi run examples/adapters.yaml --out runs/adapters

The second run starts from the first one's weights and trains the adapters and the head alone: FedPer averages the head
and leaves the adapters to their clients. In lanes many clients' adapters are trained in one call, over one network.
"""  # noqa: E501

import torch
from torch import Tensor, nn

from pflmpi.models.lora import lora


class Net(nn.Module):
    """Two hidden layers."""

    def __init__(self, num_classes: int, shape: tuple[int, ...], width: int = 64):
        super().__init__()
        self.first = nn.Linear(shape[-2] * shape[-1], width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x.flatten(1))))))


class Adapted(Net):
    """The same with adapters; everything else of it is frozen, unless `model.trainable` names it."""

    def __init__(self, num_classes: int, shape: tuple[int, ...], width: int = 64, rank: int = 2):
        super().__init__(num_classes, shape, width)
        lora(self, ["first", "second"], rank)
