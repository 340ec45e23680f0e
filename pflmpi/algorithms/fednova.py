"""FedNova: FedAvg that takes the mean of steps, not of models, so that clients with more steps do not count more."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Round, only
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.errors import ConfigError
from pflmpi.learning.client import ClientData, Counted
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Mean, Messages, Uplink, tensor
from pflmpi.tree import Tree, leaf, part

_TRAINED = ("body", "head")


@dataclass(frozen=True, kw_only=True)
class FedNova(FedAvg):
    """Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020.

    A participant trains as in FedAvg, from x to y_i in tau_i steps, and sends the direction
    d_i = (x - y_i) / ||a_i||_1 and ||a_i||_1. With plain SGD ||a_i||_1 = tau_i; with momentum rho the steps add up to
    (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho) gradients (section 4). The server (eq. 12) takes

        x <- x - tau_eff sum_i p_i d_i,    tau_eff = sum_i p_i ||a_i||_1,

    p_i = n_i / n over the participants (`weighting`). Where all clients take as many steps it is FedAvg up to rounding.

    Up: the direction, ||a_i||_1 and batch-norm statistics (means). Down: the model (shared). Persists: server: the
    model; client: nothing, or its batch-norm statistics with `training.bn: local`. Evaluated: the global model.

    Readings. tau_eff has ||a_i||_1, as the authors' code. Local steps are SGD's, with or without momentum; Adam, and
    momentum that is kept between rounds, are refused, since their a_i are others. The proximal and the server's own
    momentum of the paper are left out.

    Newcomers: the global model, as for FedAvg.
    """

    summary: ClassVar[str] = "FedAvg over normalised steps, whatever their number"
    paper: ClassVar[str] = "Wang et al., NeurIPS 2020"

    def check(self, task: Task, participants: int) -> None:
        for key, plain in (("optimizer", "sgd"), ("keep_optimizer", False)):
            if (value := getattr(task.training, key)) != plain:
                raise ConfigError(
                    f"training.{key} = {value}: FedNova knows how many gradients the steps of SGD add up to, whose "
                    f"momentum starts at zero in a round; set it to {str(plain).lower()}, or choose another algorithm"
                )

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        stats = only(task.like(), task.shared_stats)
        return {"steps": Mean({"direction": task.like(*_TRAINED), "gradients": tensor(), **stats}, by=self.weighting)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        batches = Counted(data, "train")
        state, up = super().client_update(task, client, down, replace(data, passes={"train": batches}))
        gradients = self._gradients(task, batches.steps)
        start, end = only(down["model"], _TRAINED), up["model"]
        direction = tree.map(lambda x, y: (x - y) / gradients.clamp(min=1), start, only(end, _TRAINED))
        return state, {"steps": {"direction": direction, "gradients": gradients, **only(end, task.shared_stats)}}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        return {"model": _moved(part(server, "model"), up["steps"])}

    def after_training(self, task: Task, down: Messages, up: Messages) -> Messages:
        return {"model": _moved(down["model"], up["steps"])}

    def _gradients(self, task: Task, steps: Tensor) -> Tensor:
        """||a_i||_1 for so many steps."""
        rho = task.training.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho) if rho else steps


def _moved(model: Tree, steps: Tree) -> Tree:
    """The model after so many gradients in the direction."""
    gradients = leaf(steps, "gradients")
    moved = tree.map(lambda x, d: x - gradients * d, only(model, _TRAINED), part(steps, "direction"))
    return {**model, **only(steps, ("stats",)), **moved}
