"""FedPer: a shared body, a personal head."""

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
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedPer(Algorithm):
    """Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

    Algorithms 1 and 2: clients train body and head together, upload the body (the base layers), keep the head
    (the personalization layer, here the last fully connected layer, K_P = 1); the server averages the bodies with
    weights n_k / n.

    Up: the body (mean). Down: the body (shared). Persists: server: the body; client: its head, and its batch-norm
    statistics with `training.bn: local`. Evaluated: the fresh body with the client's head.
    """

    summary: ClassVar[str] = "shared body, personal head"
    paper: ClassVar[str] = "Arivazhagan et al., 2019"
    predicts_with: ClassVar[tuple[str, ...]] = ("body",)

    weighting: Literal["samples", "clients"] = "samples"

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"body": Mean(task.like("body", *task.shared_stats), by=self.weighting)}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        return {"body": Shared(task.like("body", *task.shared_stats))}

    def init_server(self, task: Task) -> Tree:
        return {"shared": only(task.init(), ("body", *task.shared_stats))}

    def init_client(self, task: Task, client: int) -> Tree:
        return only(task.init(client), ("head", *task.local_stats))

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        shared = server["shared"]
        assert isinstance(shared, dict)
        return {"body": shared}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        model = train(task, {**down["body"], **client}, data.passes["train"], model_loss(task), data.learning_rate)
        return only(model, ("head", *task.local_stats)), {"body": only(model, ("body", *task.shared_stats))}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        return {"shared": up["body"]}

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        return task.predict({**down["body"], **client}, x)
