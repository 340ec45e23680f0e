"""pFedMe: personal models by Moreau envelopes around a global one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, Round, only
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.proximal import proximal_loss
from pflmpi.algorithms.shared_parts import ClientWeighting
from pflmpi.errors import ConfigError
from pflmpi.learning.client import Batch, ClientData
from pflmpi.learning.personal import Kept, Personal
from pflmpi.learning.sgd import step, train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class PFedMe(FedAvg):
    """T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.

    Algorithm 1. In each of R local rounds, on a fresh minibatch D, a participant solves
    theta(w_i) = argmin f(theta; D) + lambda/2 ||theta - w_i||^2 by K steps of gradient descent and moves w_i along
    the gradient of the envelope; the server moves to the mean of what comes in:

        theta <- theta - eta_p (grad f(theta; D) + lambda (theta - w_i))     K times, from theta = w_i
        w_i <- w_i - eta lambda (w_i - theta)                                eta is `training.lr`
        w_{t+1} = (1 - beta) w_t + beta * mean_i w_i

    Up: w_i (mean over clients). Down: w (shared). Persists: server: w; client: theta_i of its last minibatch.
    Evaluated: theta_i.

    Readings. R is the length of the configured pass. Theta starts from w_i on every minibatch, being a function of
    w_i and D in algorithm 1 (the authors' code goes on from the theta of the minibatch before). f has no weight decay
    of its own (in that code 0.001, which is not in the paper). eta_p decays with eta. Momentum, if configured, acts
    within the K steps. Batch norm: the statistics follow theta, and the server takes their mean whatever beta is.
    Departure: all clients of the paper train in every round and a sample of them is averaged; here the others rest.

    Newcomers: theta_i around the global w, from a participant's steps; ours, the paper has no clients that join later,
    but its theta_i is a function of w and the client's data.
    """

    summary: ClassVar[str] = "personal models by Moreau envelopes around a global one"
    paper: ClassVar[str] = "T. Dinh et al., NeurIPS 2020"
    search: ClassVar = {"prox_weight": (1.0, 100.0, "log"), "personal_lr": (0.001, 1.0, "log")}
    predicts_with: ClassVar[tuple[str, ...]] = ()

    prox_weight: Annotated[
        float, Field(gt=0, description="how strongly the personal model is drawn to the local one (lambda)")
    ] = 15.0
    personal_lr: Annotated[float, Field(gt=0, description="learning rate of the personal model (eta_p)")] = 0.09
    inner_steps: Annotated[int, Field(ge=1, description="steps of the personal model for each batch (K)")] = 5
    server_mix: Annotated[
        float, Field(gt=0, description="how far the server moves to the mean of the clients (beta)")
    ] = 1.0
    weighting: ClientWeighting = "clients"

    def check(self, task: Task, participants: int) -> None:
        for name, lr in (("algorithm.personal_lr", self.personal_lr), ("training.lr", task.training.lr)):
            if lr * self.prox_weight >= 2:
                raise ConfigError(
                    f"{name} = {lr} and algorithm.prox_weight = {self.prox_weight} make steps that overshoot further "
                    f"every time: their product is {lr * self.prox_weight:g} and must be below 2; lower one of them"
                )

    def init_client(self, task: Task) -> Tree:
        return {"personal": task.init()}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        personal = part(client, "personal")
        model = {**down["model"], **only(personal, task.local_stats)}
        personal_lr = self.personal_lr * data.decay
        loss = proximal_loss(task, self.prox_weight)
        for batch in data.passes["train"]:
            theta = train(task, model, [batch] * self.inner_steps, loss, personal_lr, fixed={"anchor": model})
            # The gradient of the envelope. Zero on padding alone, where theta stays at w.
            weights = only(model, TRAINED_PARTS)
            grad = tree.map(lambda w, t: self.prox_weight * (w - t), weights, theta)
            model = {**theta, **step(weights, grad, data.learning_rate)}
            personal = _update_if_real(personal, theta, batch)
        return {"personal": personal}, {"model": self.to_share(task, model)}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        def mix(previous: Tensor, mean: Tensor) -> Tensor:
            return (1 - self.server_mix) * previous + self.server_mix * mean

        mixed = tree.map(mix, only(part(server, "model"), TRAINED_PARTS), up["model"])
        return {"model": {**up["model"], **mixed}}

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        return {}  # theta starts anew on every minibatch

    def personal(self, task: Task) -> Personal:
        return Kept("personal")


def _update_if_real(before: Tree, after: Tree, batch: Batch) -> Tree:
    """The tree after a minibatch, or the one before it if the minibatch is only padding."""
    if batch.padding is None or batch.padding.active is None:
        return after
    real = batch.padding.active > 0
    return tree.map(lambda new, old: torch.where(real, new, old), after, before)
