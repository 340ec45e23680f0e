"""MOON: FedAvg with a contrastive loss: features near the global model's and far from those of the last local model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pflmpi.algorithms.base import CannotJoin, Newcomer, only
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.errors import ConfigError
from pflmpi.learning.client import Batch, ClientData, average, cross_entropy
from pflmpi.learning.sgd import train
from pflmpi.learning.task import SERVER, Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class Moon(FedAvg):
    """Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021.

    Algorithm 1: a participant minimises CE + mu l_con, where for a sample with features z of the model in training,
    z_glob of the received model and z_prev of the client's model at the end of its last training (eq. 3)

        l_con = -log [exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau))]

    with cosine similarity. The rest is FedAvg; with `contrast_weight: 0` it is FedAvg up to rounding.

    Up: the model (mean by samples). Down: the model (shared). Persists: server: the model; client: body (and batch-norm
    statistics) of its last model, and whether there is one. Evaluated: the global model.

    Readings. z are the features before the head; the paper puts a projection head of two layers between, which is part
    of its model. The received and the last model are in evaluation mode. A client that takes part for the first time
    has no last model, and only the cross-entropy. mu = 5 and tau = 0.5 are the paper's for CIFAR-10 (mu = 1 for
    CIFAR-100).

    Newcomers: the global model, as for FedAvg; the paper has no other model.
    """

    summary: ClassVar[str] = "FedAvg with features contrasted against the last model's"
    paper: ClassVar[str] = "Li et al., CVPR 2021"
    search: ClassVar = {"contrast_weight": (0.1, 10.0, "log"), "temperature": (0.1, 1.0)}
    any_task: ClassVar[bool] = False
    frozen_head: ClassVar[bool] = False

    contrast_weight: Annotated[float, Field(ge=0, description="weight of the contrastive loss (mu)")] = 5.0
    temperature: Annotated[float, Field(gt=0, description="of the similarities (tau)")] = 0.5

    def check(self, task: Task, participants: int) -> None:
        if not task.like()["body"]:
            raise ConfigError(
                f"MOON contrasts features of a body that is trained, and model {task.architecture.name} has none; "
                "choose another model, or algorithm fedavg"
            )

    def init_client(self, task: Task) -> Tree:
        last = only(task.of_client(SERVER).init(), ("body", "stats"))  # of no client: unread until it has trained
        return {**super().init_client(task), "last": last, "trained": torch.tensor(0.0)}

    def newcomer(self, task: Task) -> Newcomer | CannotJoin:
        return Newcomer(trains=bool(task.local_stats))  # the rest of its state is only for training

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        start = {**down["model"], **only(client, task.local_stats)}
        fixed: Tree = {
            "received": only(start, ("body", "stats")),
            "last": part(client, "last"),
            "weight": self.contrast_weight * leaf(client, "trained"),
        }

        def loss(model: Tree, batch: Batch) -> Tensor:
            z = task.features(model, batch.x, training=True)
            near, far = (
                F.cosine_similarity(z, task.features(part(model, name), batch.x), dim=-1)
                for name in ("received", "last")
            )
            contrast = average(F.softplus((far - near) / self.temperature), batch)
            return cross_entropy(task.logits(part(model, "head"), z), batch) + leaf(model, "weight") * contrast

        model = train(task, start, data.passes["train"], loss, data.learning_rate, fixed=fixed)
        last = only(model, ("body", "stats"))
        state: Tree = {
            **only(model, task.local_stats),
            "last": last,
            "trained": torch.ones_like(leaf(client, "trained")),
        }
        return state, {"model": self.to_share(task, model)}
