"""What a call for the clients of a group returns, as a tree and with names."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.kinds import Messages, as_messages
from pflmpi.runtime.executors.transfers import download
from pflmpi.tree import Tree

_NOT_KNOWN = torch.tensor(torch.nan)


@dataclass(frozen=True)
class Update:
    """What the clients of a group have trained, on the host, with a leading client axis.

    Attributes:
        states: their new states.
        up: their uplink; the messages that are folded are on the device.
        loss: [m] float64, mean training loss of each; NaN where none was counted.
        is_finite: whether all numbers of states and uplink are known to be finite.
    """

    states: Tree
    up: Messages
    loss: Tensor
    is_finite: bool


def download_update(found: Tree, kept: Collection[str], device: torch.device) -> Callable[[], Update]:
    """Begin to bring to the host what the clients of a group come to, but for the messages that stay on a device.

    Args:
        found: "state", "up" and "loss", with a leading client axis.
        kept: the names of these messages.
    """
    up = as_messages(tree.part(found, "up"))
    there = {name: tree.map(Tensor.detach, message) for name, message in up.items() if name in kept}
    if any(leaf.is_cpu for _, leaf in tree.leaves({**there})):
        there = {}
    sent: Tree = {**found, "up": {name: message for name, message in up.items() if name not in there}}
    done = download({**sent, "finiteness": _finiteness(found)}, device)

    def wait() -> Update:
        here = done()
        brought = as_messages(tree.part(here, "up"))
        is_finite = bool(tree.leaf(here, "finiteness") == 0)
        return Update(tree.part(here, "state"), {**brought, **there}, tree.leaf(here, "loss"), is_finite)

    return wait


def _finiteness(found: Tree) -> Tensor:
    """0, if all numbers of states and messages are finite; NaN otherwise, and where some are on the host."""
    leaves = [leaf for part in ("state", "up") for _, leaf in tree.leaves(tree.part(found, part))]
    numbers = [leaf for leaf in leaves if leaf.is_floating_point()]
    if not numbers or any(leaf.is_cpu for leaf in numbers):
        return _NOT_KNOWN
    return torch.cat([leaf.detach().reshape(-1) for leaf in numbers]).mul_(0).sum()
