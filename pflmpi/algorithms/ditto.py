"""Ditto: FedAvg, and beside it a personal model per client with a proximal term towards the global one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from pflmpi.algorithms.base import only
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.proximal import proximal_loss
from pflmpi.algorithms.shared_parts import ClientWeighting
from pflmpi.errors import ConfigError
from pflmpi.learning.client import ClientData
from pflmpi.learning.personal import Kept, Personal
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    """Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.

    Global (algorithm 1): FedAvg, w_{t+1} = w_t + mean over the participants of (w_k - w_t).
    Personal: min_v F_k(v) + lambda/2 ||v - w||^2, where w is the global model as received, by

        v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w_t)).

    Up: the locally trained global model (mean); the personal one never leaves. Down: the global model (shared).
    Persists: server: w; client: v_k, with its batch-norm statistics, and those of the global model with
    `training.bn: local`. Evaluated: v_k.

    Bit for bit, v_k is Local with `prox_weight: 0`, and w is FedAvg with any (and the same `weighting`).

    Readings. The plain mean over participants, as in the authors' code (`weighting: samples` for FedAvg's). Both
    models train on the same minibatches, as there; with `personal_epochs` or `personal_steps` the personal one has a
    pass of its own (pFedCFR gives Ditto "local step l_lambda = 1").
    lambda is one number for all; the authors also choose it per client, among a few values on validation data. A
    client that is absent trains neither model.

    Newcomers: v_k begins as the global model and takes the steps above. Ours: the paper has no clients that join later,
    but its objective is that of one client for a given w.
    """

    summary: ClassVar[str] = "FedAvg and a personal model drawn to the global one"
    paper: ClassVar[str] = "Li et al., ICML 2021"
    search: ClassVar = {"prox_weight": (0.001, 10.0, "log")}
    predicts_with: ClassVar[tuple[str, ...]] = ()
    measured: ClassVar[tuple[str, ...]] = ("personal",)

    prox_weight: Annotated[
        float, Field(ge=0, description="how strongly the personal model is drawn to the global one (lambda)")
    ] = 1.0
    personal_epochs: Annotated[
        int | None, Field(ge=1, description="epochs of the personal model (s); null: the minibatches of the global one")
    ] = None
    personal_steps: Annotated[
        int | None, Field(ge=1, description="minibatches of the personal model, instead of personal_epochs")
    ] = None
    weighting: ClientWeighting = "clients"

    def check(self, task: Task, participants: int) -> None:
        if self.personal_epochs is not None and self.personal_steps is not None:
            lengths = f"personal_epochs = {self.personal_epochs} and algorithm.personal_steps = {self.personal_steps}"
            raise ConfigError(f"algorithm.{lengths} both say how long the personal model trains; leave out one of them")

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        own = Pass(epochs=self.personal_epochs, steps=self.personal_steps)
        return {"train": Pass()} | ({} if own == Pass() else {"personal": own})

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        whole = super().trainings(task)
        return {**whole, "personal": whole["train"]}

    def init_client(self, task: Task) -> Tree:
        return {**super().init_client(task), "personal": task.init()}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        state, up = super().client_update(task, only(client, task.local_stats), down, data)
        batches = data.passes.get("personal", data.passes["train"])
        loss = proximal_loss(task, self.prox_weight)
        anchor: Tree = {"anchor": down["model"]}
        personal = train(
            task, part(client, "personal"), batches, loss, data.learning_rate, name="personal", fixed=anchor
        )
        return {**state, "personal": personal}, up

    def begin_as_newcomer(self, task: Task, client: Tree, down: Messages) -> Tree:
        return {**client, "personal": {**part(client, "personal"), **down["model"]}}

    def personal(self, task: Task) -> Personal:
        return Kept("personal")
