"""FedProx: FedAvg with a proximal term that keeps local models near the global one."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.proximal import proximal_loss
from pflmpi.learning.client import Loss
from pflmpi.learning.task import Task
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

    Equation 2: min_w F_k(w) + mu/2 ||w - w_t||^2, so the gradient has mu (w - w_t) added. The rest is FedAvg;
    with `prox_weight: 0` it is FedAvg bit for bit.

    Newcomers: the global model, as for FedAvg.

    Departures. The paper samples devices with probability p_k and averages plainly; with uniform sampling, as here
    and in the authors' code, the mean is weighted by samples (`weighting: clients` for the plain mean). Its second
    idea, stragglers that send what they have after fewer epochs (gamma-inexact solutions), is left out: every
    participant trains for the configured length, as in the comparisons of the papers that this project follows.
    """

    summary: ClassVar[str] = "FedAvg with a proximal term"
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    search: ClassVar = {"prox_weight": (0.0001, 1.0, "log")}

    prox_weight: Annotated[
        float, Field(ge=0, description="how strongly a client is drawn to the global model (mu)")
    ] = 0.01

    def loss(self, task: Task) -> Loss:
        return proximal_loss(task, self.prox_weight)

    def fixed(self, received: Tree) -> Tree:
        return {"anchor": received}
