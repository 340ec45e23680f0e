"""FedPer: a shared body, a personal head."""

from dataclasses import dataclass
from typing import ClassVar

from pflmpi.algorithms.shared_parts import WeightedSharedParts
from pflmpi.learning.client import ClientData, model_loss
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedPer(WeightedSharedParts):
    """Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

    Algorithms 1 and 2: clients train body and head together, upload the body (the base layers), keep the head
    (the personalization layer, here the last fully connected layer, K_P = 1); the server averages the bodies with
    weights n_k / n.

    Up: the body (mean). Down: the body (shared). Persists: server: the body; client: its head, and its batch-norm
    statistics with `training.bn: local`. Evaluated: the fresh body with the client's head.

    Newcomers: a new head, trained for the local epochs on the shared body, which stays as it is, since that is what it
    is evaluated with; ours, the paper has no clients that join later.
    """

    summary: ClassVar[str] = "shared body, personal head"
    paper: ClassVar[str] = "Arivazhagan et al., 2019"
    predicts_with: ClassVar[tuple[str, ...]] = ("body",)

    shared: ClassVar[tuple[str, ...]] = ("body",)
    message: ClassVar[str] = "body"
    state: ClassVar[str] = "shared"

    def train_as_newcomer(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        model: Tree = {**down["body"], **client}
        model = train(task, model, data.passes["train"], model_loss(task), data.learning_rate, frozen=("body",))
        return self.to_keep(task, model)
