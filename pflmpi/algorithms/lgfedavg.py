"""LG-FedAvg: local bodies, one shared head on top of them."""

from dataclasses import dataclass
from typing import ClassVar

from pflmpi.algorithms.shared_parts import ClientWeighting, MeanBy, SharedHead


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(SharedHead):
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
    any_task: ClassVar[bool] = True

    weighting: ClientWeighting = "clients"

    def averaged_by(self) -> MeanBy:
        return self.weighting
