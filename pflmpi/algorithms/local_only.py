"""Local training without communication: the baseline that collaboration has to beat."""

from dataclasses import dataclass
from typing import ClassVar

from pflmpi.algorithms.base import Algorithm
from pflmpi.learning.client import ClientData, model_loss
from pflmpi.learning.personal import Kept, Personal
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class Local(Algorithm):
    """Every client trains its own model; the same initial weights and participants as the other algorithms.

    Up: nothing. Down: nothing. Persists: client: its model. Newcomers: train alone, from the initial weights.
    """

    summary: ClassVar[str] = "every client alone; nothing travels"
    paper: ClassVar[str] = "-"
    any_task: ClassVar[bool] = True
    frozen_head: ClassVar[bool] = True
    unlike_models: ClassVar[bool] = True

    def init_client(self, task: Task) -> Tree:
        return {"model": task.init()}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        model = train(task, part(client, "model"), data.passes["train"], model_loss(task), data.learning_rate)
        return {"model": model}, {}

    def personal(self, task: Task) -> Personal:
        return Kept("model")
