"""FedFCD: features aligned with global class means, decisions of a global and a personal head added up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, Algorithm, Round
from pflmpi.algorithms.prototypes import GLOBAL_MEANS, Weighting, combine_class_means, initial_class_means, train_head
from pflmpi.errors import ConfigError
from pflmpi.learning.client import Batch, ClientData, average, class_means, cross_entropy, on_features
from pflmpi.learning.diagnostics import Diagnostic
from pflmpi.learning.optimizers import Rate
from pflmpi.learning.personal import Add, Kept, Personal, Received
from pflmpi.learning.sgd import Phase, alternate
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import ClassMeans, Downlink, Messages, OwnClasses, Shared, Uplink, as_messages, tensor
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class FedFCD(Algorithm):
    """Li et al., Hierarchical Optimization Method for Federated Learning with Feature Alignment and Decision Fusion.

    With z = f(theta_i; x), client i repeats for each local epoch (eqs. 6, 8, 9, 10; algorithm 1)

        theta_i <- SGD of CE(h(phi_g; z) + h(phi_i; z), y) + lambda * mean over the batch of (1/d) ||z - C_y||^2
        phi_i   <- SGD of CE(h(phi_g; z) + h(phi_i; z), y)

    and uploads its class means (eq. 3). Server: phi_g takes SGD steps of cross-entropy on the uploaded pairs of mean
    and label (eq. 4); global class means C_j by `prototypes.combine_class_means` (eq. 5). Prediction (eq. 8): the sum
    of logits h(phi_g; z) + h(phi_i; z). Before the first round every client uploads the means of its initial body
    (section 3.3).

    Up: label, count and mean of each class held. Down: phi_g (shared), and C_j of the classes held with a flag whether
    there is one; samples of a class without are not aligned. Persists: client: its model (batch-norm statistics too);
    server: phi_g and all C_j. Evaluated: the client's model after training with the fresh phi_g.

    Ablations (table 3): `align_weight: 0` is without feature alignment; `variant: without_fusion` trains and predicts
    with the personal logits alone (phi_g still travels, unused); `variant: without_hierarchy` trains theta_i and phi_i
    together, so that `alternation` has no meaning and both need one learning rate.

    Readings. Eq. 5 divides weights that sum to one once more by |m_j|; `class_mean_weighting: as_printed` does too, the
    default does not; a class without uploads keeps its mean. One phase is a whole epoch, each in an order of its own;
    `alternation: batch` changes sides on every batch. With `training.steps` the round has one phase of that many steps
    each. Momentum starts anew with every phase. While phi_i is trained the body is fixed, batch norm in evaluation
    mode. Eq. 4: one epoch over the pairs in a seeded shuffle, in minibatches of the clients' batch size. The
    learning rates of body and head are `training.lr` unless given, and decay as it does; that of phi_g does not.
    The paper has lambda = 1 for Fashion-MNIST, 5 for CIFAR.

    Newcomers: bodies never travel, so theirs is trained from the initial weights towards the class means, with the
    global head beside a new one of their own; ours, the paper has a fixed set of clients.
    """

    summary: ClassVar[str] = "aligned features, global and personal logits added"
    paper: ClassVar[str] = "Li et al., Computers, Materials & Continua 2024"
    search: ClassVar = {"align_weight": (0.01, 10.0, "log"), "global_head_lr": (0.001, 1.0, "log")}
    needs: ClassVar = {"alternation": ("variant", "full", "without_fusion")}
    linear_head: ClassVar[bool] = True
    predicts_with: ClassVar[tuple[str, ...]] = ("head",)
    unlike_models: ClassVar[bool] = True
    introduces: ClassVar[bool] = True

    align_weight: Annotated[float, Field(ge=0, description="pull of features to class means (lambda)")] = 1.0
    body_lr: Annotated[float | None, Field(gt=0, description="eta_f; null: training.lr")] = None
    head_lr: Annotated[float | None, Field(gt=0, description="eta_phi_i; null: training.lr")] = None
    global_head_lr: Annotated[float, Field(gt=0, description="eta_phi_g, on the server")] = 0.01
    alternation: Annotated[Literal["epoch", "batch"], Field(description="when body and head take turns")] = "epoch"
    class_mean_weighting: Annotated[Weighting, Field(description="how class means are weighted")] = "samples"
    server_epochs: Annotated[int, Field(ge=1, description="passes of the server over the class means in a round")] = 1
    server_batch_size: Annotated[int | None, Field(ge=1, description="class means in a server step; null: all")] = None
    variant: Annotated[
        Literal["full", "without_fusion", "without_hierarchy"], Field(description="full, or an ablation")
    ] = "full"

    def check(self, task: Task, participants: int) -> None:
        if not any(tree.leaves(task.like("body"))):
            raise ConfigError(
                f"algorithm fedfcd trains a body, and model {task.architecture.name} has none; choose another model"
            )
        body_lr, head_lr = self.learning_rates(task)
        if self.variant == "without_hierarchy" and body_lr != head_lr:
            raise ConfigError(
                "algorithm.variant = 'without_hierarchy' trains body and head in one step, with one learning rate; "
                f"body_lr is {body_lr} and head_lr {head_lr}; give both the same value, or neither"
            )

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        if self.variant == "without_hierarchy":
            return super().trainings(task)
        if self.alternation == "batch":
            return {"body": task.like("body"), "head": task.like("head")}
        return {}  # several trainings of each in a round

    def learning_rates(self, task: Task, decay: Rate = 1.0) -> tuple[Rate, Rate]:
        """The learning rates of body and personal head, with the factor of a round on them."""
        rates = [task.training.lr if lr is None else lr for lr in (self.body_lr, self.head_lr)]
        return rates[0] * decay, rates[1] * decay

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"means": ClassMeans(task.num_features)}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        one_class: Tree = {"mean": tensor(task.num_features), "known": tensor(dtype=torch.bool)}
        return {"head": Shared(part(task.like("head"), "head")), "class_means": OwnClasses(one_class)}

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        if self.alternation == "batch" or self.variant == "without_hierarchy":
            return {"train": Pass()}
        length = Pass(epochs=1) if task.training.steps is None else Pass()
        return {f"{side}/{phase}": length for phase in _phases(task) for side in ("body", "head")}

    def init_server(self, task: Task) -> Tree:
        return {"head": part(task.init(), "head"), **initial_class_means(task)}

    def init_client(self, task: Task) -> Tree:
        return {"model": task.init()}

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return {"head": part(server, "head"), "class_means": {"mean": server["means"], "known": server["known"]}}

    def introduce(self, task: Task, client: Tree, data: ClientData) -> Messages:
        return {"means": class_means(task, part(client, "model"), data)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:

        def aligned(model: Tree, batch: Batch) -> Tensor:
            received = as_messages(part(model, "received"))
            means, known = (leaf(received["class_means"], name) for name in ("mean", "known"))
            z = task.features(model, batch.x, training=True)
            distance = (z - means[batch.y]).square().mean(-1) * known[batch.y]
            fit = cross_entropy(self.fused(task, model, received, z), batch)
            return fit + self.align_weight * average(distance, batch)

        def head(task: Task) -> Phase:
            def fitted(model: Tree, batch: Batch) -> Tensor:
                received = as_messages(part(model, "received"))
                return cross_entropy(self.predict(task, {"model": model}, received, batch.x), batch)

            return Phase(fitted, ("head",), head_lr, name="head")

        body_lr, head_lr = self.learning_rates(task, data.decay)
        body = Phase(aligned, ("body",), body_lr, name="body")
        model, fixed_body, samples = part(client, "model"), task, data
        fixed: Tree = {"received": {**down}}
        if self.variant == "without_hierarchy":
            together = Phase(aligned, TRAINED_PARTS, body_lr)
            model = alternate(task, model, data.passes["train"], [together], fixed=fixed)
        elif self.alternation == "batch":
            model = alternate(task, model, data.passes["train"], [body, head(task)], fixed=fixed)
        else:
            for phase in _phases(task):
                model = alternate(task, model, data.passes[f"body/{phase}"], [body], fixed=fixed)
                fixed_body, samples = on_features(task, model, data, f"head/{phase}")
                batches = samples.passes[f"head/{phase}"]
                model = alternate(fixed_body, model, batches, [head(fixed_body)], fixed=fixed)
        return {"model": model}, {"means": class_means(fixed_body, model, samples)}

    def fused(self, task: Task, model: Tree, down: Messages, z: Tensor) -> Tensor:
        """The scores [B, K] for features z [B, d]: both heads' logits added up (eqs. 7, 8)."""
        own = task.logits(part(model, "head"), z)
        return own if self.variant == "without_fusion" else task.logits(down["head"], z) + own

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        head = train_head(
            part(server, "head"),
            up["means"],
            round.stream("server head"),
            lr=self.global_head_lr,
            epochs=self.server_epochs,
            batch_size=self.server_batch_size or task.training.batch_size,
        )
        return {"head": head, **combine_class_means(up["means"], server, self.class_mean_weighting)}

    def personal(self, task: Task) -> Personal:
        model = Kept("model")
        return model if self.variant == "without_fusion" else Add(model, Received("head", at="head"))

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        return {"class_means": GLOBAL_MEANS}

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        model = part(client, "model")
        return self.fused(task, model, down, task.features(model, x))


def _phases(task: Task) -> range:
    """The numbers of the turns that body and head take in a round: one per local epoch."""
    return range(1, 2 if task.training.steps is not None else task.training.epochs + 1)
