"""FedProto: clients keep whole models and exchange class means (prototypes)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Round
from pflmpi.algorithms.prototypes import GLOBAL_MEANS, Weighting, batch_means, combine_class_means, initial_class_means
from pflmpi.learning.client import Batch, ClientData, average, class_means, cross_entropy
from pflmpi.learning.diagnostics import Diagnostic
from pflmpi.learning.personal import Kept, NotAModel, Personal
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import ClassMeans, Downlink, Messages, Shared, Uplink, tensor
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class FedProto(Algorithm):
    """Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022.

    Client (eqs. 7, 8): min CE(h(f(x)), y) + lambda * mean over the batch of (1/d) ||f(x) - C_y||^2; samples whose class
    has no prototype yet add nothing. With `loss_on: means` the second term is sum_j ||m_j - C_j||_2 over the classes of
    the batch, m_j their mean features. Server (eq. 6): see `prototypes.combine_class_means`.
    Prediction: argmin_j ||f(x) - C_j|| over the classes that have a prototype.

    Up: class means and counts of the classes held. Down: all prototypes (shared), as prediction needs them.
    Persists: client: its model; server: the prototypes.

    Departures. Eq. 8 has distances between class means, the authors' code one for each sample, with the mean over the
    entries; the default is the code's, `loss_on: means` the equation on a batch's means, dozens of times stronger at
    d = 512. The means are taken after local training with the body in evaluation mode (the authors collect
    features while they train). Eq. 6 divides weights that sum to one once more by |N_j|; the default
    `class_mean_weighting: samples` does not, `as_printed` does, `clients` is the plain mean of the authors' code.
    Before any prototype exists, and with `predict_with: head`, the model's own head predicts.

    Newcomers: a model from the initial weights, trained towards the prototypes; ours, the paper has no clients that
    join later.
    """

    summary: ClassVar[str] = "whole personal models, shared class means"
    paper: ClassVar[str] = "Tan et al., AAAI 2022"
    search: ClassVar = {"prototype_weight": (0.01, 10.0, "log")}
    predicts_with: ClassVar[tuple[str, ...]] = ("prototypes",)
    unlike_models: ClassVar[bool] = True

    prototype_weight: Annotated[
        float, Field(ge=0, description="how strongly features are drawn to the global class means (lambda)")
    ] = 1.0
    class_mean_weighting: Annotated[
        Weighting,
        Field(description="class means are weighted by samples, plainly by clients, or as the paper prints it"),
    ] = "samples"
    predict_with: Annotated[
        Literal["prototypes", "head"],
        Field(description="predict the class of the nearest class mean, or with the head"),
    ] = "prototypes"

    loss_on: Annotated[
        Literal["samples", "means"],
        Field(description="each sample is drawn to its class mean, or the mean of each class of a batch"),
    ] = "samples"

    @property
    def needs_whole_batch(self) -> bool:
        """Whether the loss has class means of the batch."""
        return self.loss_on == "means" and self.prototype_weight > 0

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"means": ClassMeans(task.num_features)}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        like: Tree = {
            "means": tensor(task.num_classes, task.num_features),
            "known": tensor(task.num_classes, dtype=torch.bool),
        }
        return {"prototypes": Shared(like)}

    def init_server(self, task: Task) -> Tree:
        return initial_class_means(task)

    def init_client(self, task: Task) -> Tree:
        return {"model": task.init()}

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return {"prototypes": server}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:

        def loss(model: Tree, batch: Batch) -> Tensor:
            means, known = tree.at(model, "prototypes/means"), tree.at(model, "prototypes/known")
            z = task.features(model, batch.x, training=True)
            fit = cross_entropy(task.logits(part(model, "head"), z), batch)
            if self.loss_on == "means":
                share, batch_mean = batch_means(z, batch, len(known))
                distances: Tensor = torch.linalg.vector_norm(batch_mean - means, dim=-1)  # its gradient at zero is zero
                return fit + self.prototype_weight * (distances * ((share > 0) & known)).sum()
            distances = (z - means[batch.y]).square().mean(-1) * known[batch.y]
            return fit + self.prototype_weight * average(distances, batch)

        model = train(task, part(client, "model"), data.passes["train"], loss, data.learning_rate, fixed={**down})
        return {"model": model}, {"means": class_means(task, model, data)}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        return combine_class_means(up["means"], server, self.class_mean_weighting)

    def personal(self, task: Task) -> Personal:
        if self.predict_with == "head":
            return Kept("model")
        return NotAModel("the nearest class mean (algorithm.predict_with = 'prototypes')", nearest=Kept("model"))

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        return {"class_means": GLOBAL_MEANS}

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        model, known = part(client, "model"), leaf(down["prototypes"], "known")
        z = task.features(model, x)
        logits = task.logits(part(model, "head"), z)
        if self.predict_with == "head":
            return logits
        distances = (z.unsqueeze(1) - leaf(down["prototypes"], "means")).square().sum(-1)  # [B, K]
        scores = torch.where(known, -distances, -torch.inf)
        return torch.where(known.any(), scores, logits)
