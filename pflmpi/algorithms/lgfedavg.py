"""LG-FedAvg: local bodies, one shared head on top of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from pflmpi.algorithms.base import Algorithm, Round, only
from pflmpi.learning.client import ClientData, model_loss
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Downlink, Mean, Messages, Shared, Uplink
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(Algorithm):
    """Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020.

    A client trains its local body l_m and its copy of the global head g together, by the cross-entropy of
    g(l_m(x)); it keeps the body and uploads the head, which the server averages.

    Up: the head (mean). Down: the head (shared). Persists: server: the head; client: its body, with its batch-norm
    statistics, which never leave it (`training.bn` changes nothing). Evaluated: the client's body under the fresh head.
    Bodies may differ between clients, as long as d is the same.

    Departures and readings. The authors start all clients from a model that FedAvg has trained (400 rounds for MNIST,
    1200 for CIFAR-10); here they start from the common initial weights. The global part is the head alone, the last
    fully connected layer; theirs is the last two layers or more. The mean over the participants is plain, as in
    their code (`weighting: samples` for weights n_m / n).
    """

    summary: ClassVar[str] = "personal body, shared head"
    paper: ClassVar[str] = "Liang et al., 2020"
    predicts_with: ClassVar[tuple[str, ...]] = ("head",)
    unlike_models: ClassVar[bool] = True

    weighting: Literal["samples", "clients"] = "clients"

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"head": Mean(part(task.like("head"), "head"), by=self.weighting)}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        return {"head": Shared(part(task.like("head"), "head"))}

    def init_server(self, task: Task) -> Tree:
        return only(task.init(), ("head",))

    def init_client(self, task: Task, client: int) -> Tree:
        return only(task.init(client), ("body", "stats"))

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return {"head": part(server, "head")}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        start: Tree = {**client, "head": down["head"]}
        model = train(task, start, data.passes["train"], model_loss(task), data.learning_rate)
        return only(model, ("body", "stats")), {"head": part(model, "head")}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        return {"head": up["head"]}

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        return task.predict({**client, "head": down["head"]}, x)
