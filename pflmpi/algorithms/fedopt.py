"""FedAvg with an optimizer on the server: momentum, Adagrad, Yogi and Adam."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, Round, only
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.shared_parts import ClientWeighting
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FedAvg):
    """Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification, 2019.

    FedAvg, whose server takes the mean change of the participants with momentum (section 4.3): with Delta the mean of
    w_k - w weighted by samples, v <- beta v + Delta, w <- w + v. `server_lr` is a factor on v, 1 in the paper; with
    that and `server_momentum: 0` it is FedAvg up to rounding.

    Up, down, evaluated: as FedAvg. Persists: server: the model, v. Batch-norm statistics are averaged.

    Newcomers: the global model, as for FedAvg.
    """

    summary: ClassVar[str] = "FedAvg with momentum on the server"
    paper: ClassVar[str] = "Hsu et al., 2019"
    search: ClassVar = {"server_lr": (0.1, 10.0, "log"), "server_momentum": (0.0, 0.99)}

    server_lr: Annotated[float, Field(gt=0, description="factor on the server's step")] = 1.0
    server_momentum: Annotated[float, Field(ge=0, lt=1, description="momentum of the server (beta)")] = 0.9

    def init_server(self, task: Task) -> Tree:
        server = super().init_server(task)
        return {**server, "velocity": tree.map(torch.zeros_like, only(part(server, "model"), TRAINED_PARTS))}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        old, change = only(part(server, "model"), TRAINED_PARTS), _change(server, up)
        velocity = tree.map(lambda v, d: self.server_momentum * v + d, part(server, "velocity"), change)
        new = tree.map(lambda w, v: w + self.server_lr * v, old, velocity)
        return {"model": {**up["model"], **new}, "velocity": velocity}


@dataclass(frozen=True, kw_only=True)
class AdaptiveServer(FedAvg):
    """The adaptive server of Reddi et al.; subclasses define the update of v."""

    paper: ClassVar[str] = "Reddi et al., ICLR 2021"
    search: ClassVar = {"server_lr": (0.001, 1.0, "log"), "tau": (1e-5, 0.1, "log")}

    server_lr: Annotated[float, Field(gt=0, description="rate of the server (eta)")] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of changes")] = 0.9
    tau: Annotated[float, Field(gt=0, description="added to the root, degree of adaptivity")] = 1e-3
    weighting: ClientWeighting = "clients"

    @abstractmethod
    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        """The new v, from the previous one and Delta^2."""

    def init_server(self, task: Task) -> Tree:
        server = super().init_server(task)
        trained = only(part(server, "model"), TRAINED_PARTS)
        square = tree.map(lambda leaf: torch.full_like(leaf, self.tau**2), trained)
        return {**server, "mean": tree.map(torch.zeros_like, trained), "square": square}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        old, change = only(part(server, "model"), TRAINED_PARTS), _change(server, up)
        mean = tree.map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, part(server, "mean"), change)
        square = tree.map(lambda v, d: self.squares(v, d.square()), part(server, "square"), change)
        new = tree.map(lambda x, m, v: x + self.server_lr * m / (v.sqrt() + self.tau), old, mean, square)
        return {"model": {**up["model"], **new}, "mean": mean, "square": square}


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(AdaptiveServer):
    """Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 2.

    FedAvg, whose server takes the mean change Delta of the participants, entry by entry, by

        m <- beta1 m + (1 - beta1) Delta,    v <- v + Delta^2,
        x <- x + eta m / (sqrt(v) + tau),

    from m = 0 and v = tau^2, without a correction of the first rounds' bias.

    Up, down, evaluated: as FedAvg. Persists: server: the model, m, v. Batch-norm statistics are averaged.

    Readings. The plain mean over participants, as printed; the authors' code weighs by samples (`weighting`).
    tau = 0.001 and beta1 = 0 as the paper recommends; its eta differ by task, ours is 0.1.

    Newcomers: the global model, as for FedAvg.
    """

    summary: ClassVar[str] = "FedAvg with Adagrad on the server"

    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of changes")] = 0.0

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True, kw_only=True)
class FedYogi(AdaptiveServer):
    """Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 2.

    FedAdagrad but for v <- v - (1 - beta2) Delta^2 sign(v - Delta^2); beta1 = 0.9 and beta2 = 0.99 as
    the paper recommends.

    Newcomers: the global model, as for FedAvg.
    """

    summary: ClassVar[str] = "FedAvg with Yogi on the server"

    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of squared changes")] = 0.99

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


@dataclass(frozen=True, kw_only=True)
class FedAdam(AdaptiveServer):
    """Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 2.

    FedAdagrad but for v <- beta2 v + (1 - beta2) Delta^2; beta1 = 0.9 and beta2 = 0.99 as
    the paper recommends.

    Newcomers: the global model, as for FedAvg.
    """

    summary: ClassVar[str] = "FedAvg with Adam on the server"

    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of squared changes")] = 0.99

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


def _change(server: Tree, up: Messages) -> Tree:
    """Delta: the mean model of the participants minus the one that they received."""
    return tree.map(torch.sub, only(up["model"], TRAINED_PARTS), only(part(server, "model"), TRAINED_PARTS))
