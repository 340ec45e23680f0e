"""SCAFFOLD: FedAvg with control variates that correct the clients' drift."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, CannotJoin, Newcomer, Round, only
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.shared_parts import ClientWeighting
from pflmpi.errors import ConfigError
from pflmpi.learning.client import Batch, ClientData, Counted, model_loss
from pflmpi.learning.sgd import Direction, gradient, train
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Downlink, Messages, Shared, Sum, Uplink
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    """Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.

    Algorithm 1. A participant starts from the received x with y = x and takes K steps

        y <- y - eta_l (g_i(y) - c_i + c),

    then renews its control variate c_i (line 12): c_i+ = c_i - c + (x - y) / (K eta_l) with `control: steps` (option
    II); c_i+ = g_i(x), the gradient over all its samples, with `control: gradient` (option I). The server (lines 16,
    17):

        x <- x + eta_g / |S| sum_S (y_i - x),    c <- c + 1/N sum_S (c_i+ - c_i).

    Up: the model (mean over clients), and the change of c_i (sum). Down: the model and c (shared). Persists: server:
    the model, c; client: c_i, and its batch-norm statistics with `training.bn: local`. Evaluated: the global model.

    Readings. Both kinds of control variates start at zero, as in the authors' experiments. eta_l is the rate of the
    round, so that c_i stays a gradient when it falls. Weight decay and clipping belong to the steps that c_i averages;
    momentum and Adam do not leave a mean of gradients and are refused. Batch-norm statistics are averaged.
    The training loss is that of g_i alone, without the correction.

    Newcomers: the global model, as for FedAvg; the paper has no clients that join later.
    """

    summary: ClassVar[str] = "FedAvg with control variates against client drift"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"

    server_lr: Annotated[float, Field(gt=0, description="the server's rate along the mean change (eta_g)")] = 1.0
    control: Annotated[
        Literal["steps", "gradient"],
        Field(description="a client's control variate: its mean step (option II), or a gradient (option I)"),
    ] = "steps"
    weighting: ClientWeighting = "clients"

    def check(self, task: Task, participants: int) -> None:
        for key, plain in (("optimizer", "sgd"), ("momentum", 0.0)):
            if (value := getattr(task.training, key)) != plain:
                raise ConfigError(
                    f"training.{key} = {value}: SCAFFOLD takes the sum of a client's steps for one of its gradients, "
                    f"which holds for plain SGD alone; set it to {plain}, or choose another algorithm"
                )

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        return {"train": Pass()} | ({"gradient": Pass(epochs=1)} if self.control == "gradient" else {})

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {**super().uplink(task), "change": Sum(task.like(*TRAINED_PARTS))}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        return {**super().downlink(task), "control": Shared(task.like(*TRAINED_PARTS))}

    def init_server(self, task: Task) -> Tree:
        return {**super().init_server(task), "control": self._zeros(task)}

    def init_client(self, task: Task) -> Tree:
        return {**super().init_client(task), "control": self._zeros(task)}

    def publish(self, task: Task, server: Tree, receivers: object) -> Messages:
        return {"model": part(server, "model"), "control": part(server, "control")}

    def newcomer(self, task: Task) -> Newcomer | CannotJoin:
        return Newcomer(trains=bool(task.local_stats))  # the rest of its state is only for training

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        own, shared, received = part(client, "control"), down["control"], down["model"]
        start = {**received, **only(client, task.local_stats)}
        correction: Tree = {"correction": tree.map(torch.sub, shared, own)}
        batches, lr, loss = Counted(data, "train"), data.learning_rate, model_loss(task)

        def corrected(params: Tree, batch: Batch) -> tuple[Tree, Tensor]:
            grad, value = gradient(task, params, loss, batch, TRAINED_PARTS)
            return tree.map(torch.add, grad, part(params, "correction")), value

        model = train(task, start, batches, Direction(corrected), lr, fixed=correction)
        if self.control == "gradient":
            new = self._full_gradient(task, start, data.passes["gradient"])
        else:
            length = batches.steps * lr
            mean_step = tree.map(lambda x, y: (x - y) / length, only(start, TRAINED_PARTS), only(model, TRAINED_PARTS))
            new = tree.map(lambda c, all, mean: torch.where(length > 0, c - all + mean, c), own, shared, mean_step)
        change = tree.map(torch.sub, new, own)
        state: Tree = {**only(model, task.local_stats), "control": new}
        return state, {"model": self.to_share(task, model), "change": change}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        model: Tree = up["model"]
        if self.server_lr != 1:
            old, mean = (only(weights, TRAINED_PARTS) for weights in (part(server, "model"), model))
            model = {**model, **tree.map(lambda x, y: x + self.server_lr * (y - x), old, mean)}
        share = 1 / task.num_clients
        control = tree.map(lambda c, change: c + share * change, part(server, "control"), up["change"])
        return {"model": model, "control": control}

    def _zeros(self, task: Task) -> Tree:
        return tree.map(torch.zeros_like, only(task.init(), TRAINED_PARTS))

    def _full_gradient(self, task: Task, model: Tree, batches: Iterable[Batch]) -> Tree:
        """Gradient of the mean loss over the samples of a pass; batch-norm statistics stay as they are."""
        total = tree.map(torch.zeros_like, only(model, TRAINED_PARTS))
        num_samples: Tensor | float = 0.0
        for batch in batches:
            copy = {**model, **tree.clone(only(model, ("stats",)))}
            grad, _ = gradient(task, copy, model_loss(task), batch, TRAINED_PARTS)
            count = batch.count
            num_samples = num_samples + count
            total = tree.map(lambda sum, grad, count=count: sum + count * grad, total, grad)
        return tree.map(lambda sum: sum / torch.as_tensor(num_samples).clamp(min=1), total)
