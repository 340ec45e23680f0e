"""FedRep: a shared body and personal heads, trained one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.fedper import FedPer
from pflmpi.algorithms.shared_parts import ClientWeighting
from pflmpi.learning.client import Batch, ClientData, model_loss, on_features, task_loss
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    """Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.

    Algorithm 1: client i takes `head_epochs` epochs (tau) on its head h_i with the received body fixed, then the
    configured local epochs (the authors have 1) on the body with h_i fixed; the server averages the bodies plainly.
    The rest is FedPer; with `personal_layers` the head has more layers than the last.

    Up: the body (mean). Down: the body (shared). Persists: server: the body; client: its head, and its batch-norm
    statistics with `training.bn: local`. Evaluated: the fresh body with the client's head.

    Readings. The authors' code has 10 head epochs for CIFAR-10 with 2 classes per client, 15 with 5 and for CIFAR-100;
    `training.steps` sets the length of the body's phase alone. Both phases have the configured optimiser, each with a
    momentum buffer of its own. While the head is trained the body is fixed, batch norm in evaluation mode, so that the
    head learns on the features that prediction uses. The authors train the heads of all clients once more after the
    last round; here that is left out, so that every round is evaluated alike.

    Newcomers: a new head, trained for `head_epochs` on the shared body, which is the paper's way to join later: the
    body is learnt once, a new client needs only its head.
    """

    summary: ClassVar[str] = "shared body, personal head, trained one after the other"
    paper: ClassVar[str] = "Collins et al., ICML 2021"
    search: ClassVar = {"head_epochs": (1, 10)}

    weighting: ClientWeighting = "clients"
    head_epochs: Annotated[int, Field(ge=0, description="epochs of the head before the body is trained (tau)")] = 10

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        return {"head": Pass(epochs=self.head_epochs), "body": Pass()}

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        halves = {"head": self.to_keep(task, task.like()), "body": self.to_share(task, task.like())}
        return {name: {part: half[part] for part in half if part != "stats"} for name, half in halves.items()}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        model, rate = self.whole(client, down["body"]), data.learning_rate
        body, head = (tuple(dict(tree.leaves(half))) for half in (down["body"], client))
        # With further personal layers the head's phase trains a part of the body.
        fixed_body, samples = (task, data) if "body" in client else on_features(task, model, data, "head")

        def head_loss(model: Tree, batch: Batch) -> Tensor:
            return task_loss(fixed_body, fixed_body.predict(model, batch.x), batch)

        model = train(fixed_body, model, samples.passes["head"], head_loss, rate, frozen=body, name="head")
        model = train(task, model, data.passes["body"], model_loss(task), rate, frozen=head, name="body")
        return self.to_keep(task, model), {"body": self.to_share(task, model)}

    def train_as_newcomer(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        return self.client_update(task, client, down, data)[0]  # its head was trained on the received body
