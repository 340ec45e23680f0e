"""FedAvg with clients that diverge or raise in chosen rounds."""

from dataclasses import dataclass

import torch

from pflmpi import tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.learning.client import ClientData
from pflmpi.learning.personal import Personal, Received
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree, leaf

NAME = "failing"
FAULTS = {"ValueError": ValueError, "MemoryError": MemoryError, "OutOfMemoryError": torch.OutOfMemoryError}
TEXTS = {
    "OutOfMemoryError": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of "
    "which 1.2 GiB is free. Including non-PyTorch memory, this process has 78 GiB memory in use. If reserved but "
    "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
}


@dataclass(frozen=True, kw_only=True)
class Failing(FedAvg):
    """Clients count their updates.

    Args:
        round: in which clients fail; 0 for every one.
        bad_message: the client whose message is not finite then; -1 for none.
        bad_state: the client whose state is not finite then; -1 for none.
        steps: clients that make so many steps raise then, and with them the lanes that they are computed in.
        fault: what they raise.
    """

    round: int = -1
    bad_message: int = -1
    bad_state: int = -1
    steps: int = -1
    fault: str = "ValueError"

    def init_client(self, task: Task, client: int) -> Tree:
        return {"client": torch.tensor(client), "updates": torch.tensor(0.0)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        fails = self.round in (0, data.round)
        if fails and len(data.passes["train"]) == self.steps:
            raise FAULTS[self.fault](TEXTS.get(self.fault, "its data is odd"))
        _, up = super().client_update(task, {}, down, data)
        number = leaf(client, "client")
        nothing = torch.tensor(float("nan"))
        state = {
            "client": number,
            "updates": torch.where((number == self.bad_state) & fails, nothing, leaf(client, "updates") + 1),
        }
        bad = (number == self.bad_message) & fails
        return state, {"model": tree.map(lambda leaf: torch.where(bad, nothing, leaf), up["model"])}

    def personal(self, task: Task) -> Personal:
        return Received("model")


def registered(monkeypatch, **how):
    """Register the algorithm for the time of a test; its section of a configuration."""
    monkeypatch.setitem(ALGORITHMS._objects, NAME, Failing)
    return {"name": NAME, **how}
