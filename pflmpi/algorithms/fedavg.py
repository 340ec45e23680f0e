"""FedAvg: one global model, averaged from the participants' local training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from pflmpi.algorithms.base import Algorithm, Round, only
from pflmpi.learning.client import ClientData, Loss, model_loss
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Downlink, Mean, Messages, Shared, Uplink
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

    Algorithm 1: w_{t+1} = sum_k (n_k / n) w^k_{t+1} over the participants of the round.

    Up: the model (mean). Down: the model (shared). Persists: server: the model; client: nothing, or its
    batch-norm statistics with `training.bn: local`. Evaluated: the global model on every client's test split.
    Batch norm: the statistics are averaged with the weights (`bn: average`); the paper has no batch norm.
    """

    summary: ClassVar[str] = "one global model, the sample-weighted mean"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    predicts_with: ClassVar[tuple[str, ...]] = ("model",)

    weighting: Literal["samples", "clients"] = "samples"

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"model": Mean(task.like("body", "head", *task.shared_stats), by=self.weighting)}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        return {"model": Shared(task.like("body", "head", *task.shared_stats))}

    def init_server(self, task: Task) -> Tree:
        return {"model": only(task.init(), ("body", "head", *task.shared_stats))}

    def init_client(self, task: Task, client: int) -> Tree:
        return only(task.init(client), task.local_stats)

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return {"model": part(server, "model")}

    def loss(self, task: Task, received: Tree) -> Loss:
        """Return the local objective; `received` is the model from the server."""
        return model_loss(task)

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        received = down["model"]
        model = train(task, {**received, **client}, data.passes["train"], self.loss(task, received), data.learning_rate)
        return only(model, task.local_stats), {"model": only(model, ("body", "head", *task.shared_stats))}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        return {"model": up["model"]}

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        return task.predict({**down["model"], **client}, x)
