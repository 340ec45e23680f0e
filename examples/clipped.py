"""An algorithm of one's own, on the clients' side: FedPer whose clients send no larger change than a norm."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from pflmpi import tree
from pflmpi.algorithms.base import only
from pflmpi.algorithms.fedper import FedPer
from pflmpi.learning.client import ClientData
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Clipped(FedPer):
    """FedPer; what a client has changed of the shared body is scaled down to a norm of at most `largest_change`."""

    summary: ClassVar[str] = "FedPer with clipped changes"
    paper: ClassVar[str] = "-"

    largest_change: Annotated[float, Field(gt=0, description="largest norm of the change that a client sends")] = 1.0

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        state, up = super().client_update(task, client, down, data)
        before, after = (only(message["body"], ("body",)) for message in (down, up))
        change = tree.map(torch.sub, after, before)
        norm = torch.stack([leaf.square().sum() for _, leaf in tree.leaves(change)]).sum().sqrt()
        share = (self.largest_change / norm.clamp(min=1e-12)).clamp(max=1)
        clipped = tree.map(lambda old, step: old + share * step, before, change)
        return state, {"body": {**up["body"], **clipped}}
