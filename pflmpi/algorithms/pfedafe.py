"""pFedAFE: every client mixes the shared body with its own, in a proportion learned anew in every round."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import only
from pflmpi.algorithms.fedper import FedPer
from pflmpi.algorithms.shared_parts import ClientWeighting
from pflmpi.learning.client import Batch, ClientData, model_loss, task_loss
from pflmpi.learning.diagnostics import Diagnostic, PerClient
from pflmpi.learning.parts import overlay, select_parts
from pflmpi.learning.personal import Kept, Mix, NotAModel, Personal, Received
from pflmpi.learning.sgd import Phase, alternate, train
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class PFedAFE(FedPer):
    """Lai et al., Personalized Federated Learning with Adaptive Feature Extraction and Category Prediction, 2024.

    Client, with the server's body W_f, its own body W_f,i and head W_g,i of its last round (algorithm 1, eqs. 5, 7):

        beta   <- beta - lr dL/dbeta, clamped to [0, 1], for some minibatches, from the initial value in every round;
                  L = CE(((1 - beta) W_f + beta W_f,i) o W_g,i), so dL/dbeta = sum_p <dL/dp, W_f,i - W_f>
        W_f,i  <- (1 - beta) W_f + beta W_f,i

    and then body and head train together. Server (eq. 4): the plain mean of the participants' bodies.

    Up: the body (mean). Down: the body (shared). Persists: server: the body; client: body, head, the beta of its
    last update (a result: every checkpoint has it) and whether it has trained. Evaluated: as all clients do in the
    last round of algorithm 1, a new beta and the mix of fresh and own body, without training.

    Readings. The last round's step is taken at every evaluation (`adapt`) and not kept, so that no round is special:
    what is measured after round t is what the paper has after t + 1 rounds, of which the last does not train. A client
    that has not trained has no body of its own: its beta is 0. The paper gives neither the length nor the rate of the
    beta update (`beta_steps`, `beta_lr`); it is plain SGD here, and `training.lr_decay` leaves its rate alone, as beta
    starts anew in every round. Batch-norm statistics are mixed with the body, unless `training.bn: local`; beta learns
    in evaluation mode, on the model as it would predict, by the parameters alone. With `adaptive: false` beta stays at
    its initial value: at 0 this is FedPer with plain means. W_g is the last layer, or the last `personal_layers`, such
    as both fully connected ones that table 2 has for CIFAR-100.

    Newcomers: a first round from the shared body and a new head, then beta and the mix as for everybody; ours, the
    paper has a fixed set of clients.
    """

    summary: ClassVar[str] = "shared body mixed with the client's own, in a learned proportion"
    paper: ClassVar[str] = "Lai et al., Future Internet 2024"
    needs: ClassVar = {"beta_steps": ("adaptive", True), "beta_lr": ("adaptive", True)}
    predicts_with: ClassVar[tuple[str, ...]] = ("body",)
    adapts_with: ClassVar[tuple[str, ...]] = ("beta",)

    weighting: ClientWeighting = "clients"
    beta_init: Annotated[
        float, Field(ge=0, le=1, description="share of the own body in the mixture, at the start (beta)")
    ] = 0.5
    beta_steps: Annotated[int, Field(ge=1, description="steps in which that share is learned in an update")] = 10
    beta_lr: Annotated[float, Field(gt=0, description="learning rate of that share")] = 0.1
    adaptive: Annotated[
        bool, Field(description="mix in a learned share; otherwise the shared body replaces the own one")
    ] = True

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        return {"train": Pass(), "beta": Pass(steps=self.beta_steps if self.adaptive else 0)}

    def init_client(self, task: Task) -> Tree:
        return {**task.init(), "beta": torch.zeros(()), "trained": torch.tensor(False)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        beta = self.mixing_ratio(task, client, down["body"], data)
        start = mixed(client, down["body"], beta)
        model = train(task, start, data.passes["train"], model_loss(task), data.learning_rate)
        state: Tree = {**model, "beta": beta, "trained": torch.ones_like(leaf(client, "trained"))}
        return state, {"body": self.to_share(task, model)}

    def mixing_ratio(self, task: Task, client: Tree, shared: Tree, data: ClientData) -> Tensor:
        """beta, []: the share of the client's own body in the mix; 0 before its first training."""

        def loss(params: Tree, batch: Batch) -> Tensor:
            model = mixed(part(params, "own"), part(params, "shared"), leaf(params, "beta"))
            # PyTorch has no derivative by running statistics.
            fixed = tree.map(Tensor.detach, only(model, ("stats",)))
            return task_loss(task, task.predict({**model, **fixed}, batch.x), batch)

        beta = torch.full_like(leaf(client, "beta"), self.beta_init)
        if self.adaptive:
            phase = Phase(loss, ("beta",), self.beta_lr, plain=True, limits=(0.0, 1.0))
            beta = leaf(
                alternate(task, {"beta": beta}, data.passes["beta"], [phase], fixed={"own": client, "shared": shared}),
                "beta",
            )
        return torch.where(leaf(client, "trained"), beta, 0.0)

    def train_as_newcomer(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        return self.client_update(task, client, down, data)[0]  # unlike FedPer's, it trains a body of its own

    def adapt(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        return mixed(client, down["body"], self.mixing_ratio(task, client, down["body"], data))

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        return task.predict(client, x)  # adapted: `adapt` has mixed the bodies

    def personal(self, task: Task) -> Personal:
        if not self.adaptive:
            return Mix(Kept(), Received("body"), share="trained", times=self.beta_init)
        return NotAModel(
            "a mix of its own and the shared body whose proportion it learns anew on its data",
            nearest=Mix(Kept(), Received("body"), share="beta"),
        )

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        return {
            "beta": PerClient(
                title="Beta of each client",
                caption="The share of its own body that a client mixed into the shared one at its last update: 0 only "
                "the shared body, 1 only its own.",
                kept="beta",
                known="trained",
                limits=(0.0, 1.0),
            )
        }


def mixed(client: Tree, shared: Tree, beta: Tensor) -> Tree:
    """The client's model with (1 - beta) shared + beta own wherever the server has a value (eq. 5)."""
    own = only(client, ("body", "head", "stats"))
    body = select_parts(own, dict(tree.leaves(shared)))
    return overlay(own, tree.mix(lambda entry, shared_entry: (1 - beta) * shared_entry + beta * entry, body, shared))
