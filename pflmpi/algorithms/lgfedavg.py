"""LG-FedAvg: local bodies, one shared head on top of them."""

from dataclasses import dataclass
from typing import ClassVar

from pflmpi.algorithms.base import only
from pflmpi.algorithms.shared_parts import ClientWeighting, WeightedSharedParts
from pflmpi.learning.personal import Kept, Merge, Personal, Received
from pflmpi.learning.task import Task
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(WeightedSharedParts):
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

    Newcomers: bodies never travel, so theirs is trained from the initial weights, with the shared head to begin with.
    Ours: the paper classifies samples of unknown clients by all clients' models together, which needs their bodies.
    """

    summary: ClassVar[str] = "personal body, shared head"
    paper: ClassVar[str] = "Liang et al., 2020"
    predicts_with: ClassVar[tuple[str, ...]] = ("head",)
    unlike_models: ClassVar[bool] = True
    message: ClassVar[str] = "head"
    state: ClassVar[str] = "head"

    weighting: ClientWeighting = "clients"

    def to_share(self, task: Task, model: Tree) -> Tree:
        return part(model, "head")

    def to_keep(self, task: Task, model: Tree) -> Tree:
        return only(model, ("body", "stats"))

    def whole(self, client: Tree, received: Tree) -> Tree:
        return {**client, "head": received}

    def personal(self, task: Task) -> Personal:
        return Merge((Kept(), Received("head", at="head")))
