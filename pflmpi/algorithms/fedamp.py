"""FedAMP: every client has its own cloud model, a mix that favours similar clients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, Algorithm, Round, only
from pflmpi.algorithms.distances import attention, cosines, inner_products, squared_distances, weighted_sums
from pflmpi.algorithms.proximal import proximal_loss
from pflmpi.learning.client import ClientData
from pflmpi.learning.diagnostics import ClientWeights, Diagnostic
from pflmpi.learning.personal import Kept, Personal
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Downlink, Messages, Own, Rows, Uplink
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class FedAMP(Algorithm):
    """Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021.

    Server (eq. 4): u_i = (1 - sum_{j != i} xi_ij) w_i + sum_{j != i} xi_ij w_j, xi_ij = alpha A'(||w_i - w_j||^2), and
    A(x) = 1 - exp(-x / sigma), so A'(x) = exp(-x / sigma) / sigma. With `weighting: cosine`, the paper's heuristic for
    deep networks (HeurFedAMP): xi_ii is a constant (`self_weight`), and for j != i, with sigma here `cosine_scale`,

        xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)).

    Client (eq. 5): min F_i(w) + lambda / (2 alpha) ||w - u_i||^2, starting from its own w_i (`start: cloud`: from u_i).

    Up: the model. Down: the client's own u_i, the answer to it.
    Persists: client: w_i and u_i. Evaluated: w_i.

    Departures. With partial participation messages pass between the participants of the round, and a client uses its
    u_i in its next participation; its first u_i is the initial model. If the xi_ij of a client sum to more than 1,
    which the paper excludes by the choice of alpha, they are divided by the sum and the self weight is 0, so that u_i
    stays a convex combination. Distances and cosines are over the whole parameter vector (batch-norm statistics stay
    local). The only participant of a round has a self weight of 1.

    The proximal step is lr lambda / alpha, which is 1e-4 lr with the paper's values: almost local training, since it
    starts from the own w_i. For stronger collaboration choose `start: cloud`, or a smaller alpha (with sigma, since
    their ratio sets the weights); with `weighting: cosine` alpha has no other effect.

    The default constants of the heuristic, 10 and 0.5, are ours: the authors have no public code for it.

    Newcomers: the server has no model of theirs to compare, so their u_i is the mean of the others' cloud models, and
    w_i starts from it whatever `start` is; ours, the paper has a fixed set of clients.
    """

    summary: ClassVar[str] = "a cloud model per client, by attentive message passing"
    paper: ClassVar[str] = "Huang et al., AAAI 2021"
    search: ClassVar = {"alpha": (1.0, 1e5, "log"), "prox_weight": (0.001, 10.0, "log")}
    needs: ClassVar = {
        "sigma": ("weighting", "distance"),
        "cosine_scale": ("weighting", "cosine"),
        "self_weight": ("weighting", "cosine"),
    }
    any_task: ClassVar[bool] = True
    frozen_head: ClassVar[bool] = True

    alpha: Annotated[float, Field(ge=0, description="step size of the message passing (alpha_k)")] = 1e4
    prox_weight: Annotated[
        float, Field(ge=0, description="how strongly a client is drawn to its cloud model (lambda)")
    ] = 1.0
    sigma: Annotated[
        float, Field(gt=0, description="scale of squared distances, above which models do not attract each other")
    ] = 1e6
    weighting: Annotated[
        Literal["distance", "cosine"],
        Field(description="attraction by distance, or by cosine (the paper's heuristic for deep networks)"),
    ] = "distance"
    cosine_scale: Annotated[
        float, Field(ge=0, description="sharpness of the weights by cosine (sigma of the heuristic)")
    ] = 10.0
    self_weight: Annotated[
        float, Field(ge=0, le=1, description="weight of the own model with weighting cosine (xi_ii)")
    ] = 0.5
    start: Annotated[
        Literal["own", "cloud"], Field(description="local training starts from the own model, or from the cloud model")
    ] = "own"

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"model": Rows(task.like(*TRAINED_PARTS))}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        return {"cloud": Own(task.like(*TRAINED_PARTS), kept=True)}

    def init_client(self, task: Task) -> Tree:
        return {"model": task.init()}

    def init_received(self, task: Task) -> Messages:
        return {"cloud": only(task.init(), TRAINED_PARTS)}

    def begin_as_newcomer(self, task: Task, client: Tree, down: Messages) -> Tree:
        return {"model": {**part(client, "model"), **down["cloud"]}}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        cloud, own = down["cloud"], part(client, "model")
        loss = proximal_loss(task, self.prox_weight / self.alpha if self.alpha else 0.0)
        begin = {**own, **cloud} if self.start == "cloud" else own
        model = train(task, begin, data.passes["train"], loss, data.learning_rate, fixed={"anchor": cloud})
        return {"model": model}, {"model": only(model, TRAINED_PARTS)}

    def answer(self, task: Task, server: Tree, up: Messages, round: Round) -> Messages:
        weights = self.weights(up["model"])
        return {"cloud": tree.map(lambda rows: weighted_sums(weights, rows), up["model"])}

    def weights(self, models: Tree) -> Tensor:
        """The message weights xi [P, P] (float64), rows summing to one, of the models [P, ...]."""
        xi = self._by_cosine(models) if self.weighting == "cosine" else self._by_distance(models)
        return xi + torch.diag(1 - xi.sum(1))

    def _by_distance(self, models: Tree) -> Tensor:
        products = tree.map(lambda rows: inner_products(rows, from_first=True), models)
        xi = attention(squared_distances(products), self.alpha, self.sigma)
        return xi / xi.sum(1, keepdim=True).clamp(min=1)

    def _by_cosine(self, models: Tree) -> Tensor:
        scores = (self.cosine_scale * cosines(tree.map(inner_products, models))).fill_diagonal_(-torch.inf)
        if len(scores) == 1:  # no other participant
            return torch.zeros_like(scores)
        return (1 - self.self_weight) * scores.softmax(1)

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        return {
            "fusion_weights": ClientWeights(
                title="Weights of the cloud models",
                caption="The weight ξ of a participant's model (column) in another's cloud model.",
            )
        }

    def diagnose(self, task: Task, server: Tree, up: Messages, round: Round) -> Mapping[str, Tensor]:
        return {"fusion_weights": self.weights(up["model"])}

    def personal(self, task: Task) -> Personal:
        return Kept("model")
