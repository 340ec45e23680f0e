"""FedNova: FedAvg with normalised updates, so that clients with more local steps do not count more."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, Round, only
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.errors import ConfigError
from pflmpi.learning.client import ClientData, Counted
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Mean, Messages, Uplink, tensor
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class FedNova(FedAvg):
    """Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020.

    A participant trains as in FedAvg, from x to y_i in tau_i steps, and sends the direction
    d_i = (x - y_i) / ||a_i||_1 and ||a_i||_1. With plain SGD ||a_i||_1 = tau_i; with momentum rho the steps add up to
    (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho) gradients (section 4). The server (eq. 12) takes

        x <- x - tau_eff sum_i p_i d_i,    tau_eff = sum_i p_i ||a_i||_1,

    p_i = n_i / n over the participants (`weighting`). With equal numbers of steps it is FedAvg up to rounding.

    Up: the direction, ||a_i||_1 and batch-norm statistics (means). Down: the model (shared). Persists: server: the
    model; client: nothing, or its batch-norm statistics with `training.bn: local`. Evaluated: the global model.

    Readings. tau_eff uses ||a_i||_1, as the authors' code does. Local steps are SGD's, with or without momentum; Adam
    and momentum kept between rounds are refused, since their a_i differ. The paper's proximal term and server momentum
    are left out.

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
        direction, stats = task.like(*TRAINED_PARTS), only(task.like(), task.shared_stats)
        return {"steps": Mean({"direction": direction, "gradients": tensor(), **stats}, by=self.weighting)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        batches = Counted(data, "train")
        state, up = super().client_update(task, client, down, replace(data, passes={"train": batches}))
        num_gradients = self._count_gradients(task, batches.steps)
        start, end = only(down["model"], TRAINED_PARTS), up["model"]
        direction = tree.map(lambda x, y: (x - y) / num_gradients.clamp(min=1), start, only(end, TRAINED_PARTS))
        return state, {"steps": {"direction": direction, "gradients": num_gradients, **only(end, task.shared_stats)}}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        return {"model": _apply_steps(part(server, "model"), up["steps"])}

    def after_training(self, task: Task, down: Messages, up: Messages) -> Messages:
        return {"model": _apply_steps(down["model"], up["steps"])}

    def _count_gradients(self, task: Task, steps: Tensor) -> Tensor:
        """||a_i||_1: how many gradients the steps of SGD add up to."""
        rho = task.training.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho) if rho else steps


def _apply_steps(model: Tree, steps: Tree) -> Tree:
    """The model moved by a number of gradients along a direction; or the models [m, ...] of clients."""
    num_gradients = leaf(steps, "gradients")  # [] or [m]

    def move(x: Tensor, d: Tensor) -> Tensor:
        return x - num_gradients.reshape(num_gradients.shape + (1,) * (d.ndim - num_gradients.ndim)) * d

    trained = tree.map(move, only(model, TRAINED_PARTS), part(steps, "direction"))
    return {**model, **only(steps, ("stats",)), **trained}
