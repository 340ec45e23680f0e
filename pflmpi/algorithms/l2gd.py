"""L2GD: personal models pulled to their mean, with random numbers of steps between aggregations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from pflmpi import tree
from pflmpi.algorithms.base import Round, only
from pflmpi.algorithms.shared_parts import SharedParts
from pflmpi.errors import ConfigError
from pflmpi.learning.client import ClientData, model_loss
from pflmpi.learning.optimizers import Rate
from pflmpi.learning.personal import Kept, Personal
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Mean, Messages, Uplink
from pflmpi.rng import stream
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class L2GD(SharedParts):
    """Hanzely and Richtarik, Federated Learning of a Mixture of Global and Local Models, 2020.

    min 1/n sum_i f_i(x_i) + lambda/(2n) sum_i ||x_i - mean(x)||^2. Algorithm 1 throws one coin for all clients in
    every iteration:

        with probability 1 - p:  x_i <- x_i - alpha / (n (1 - p)) grad f_i(x_i)
        with probability p:      x_i <- (1 - alpha lambda / (n p)) x_i + alpha lambda / (n p) mean(x)

    The mean does not change between two aggregations without a local step between them, so only the first one of such
    a run communicates. A round here is such a communication: a client takes the aggregation steps that followed the
    last one, takes the local steps until the next, and uploads. With m aggregation steps the first part is

        x_i <- (1 - alpha lambda / (n p))^m x_i + (1 - (1 - alpha lambda / (n p))^m) mean(x).

    The lengths of both runs are geometric and drawn for each round separately: they depend only on seed and round.

    Up: x_i (mean over clients). Down: the mean (shared). Persists: server: the mean; client: x_i.
    Evaluated: x_i after the local steps of the round.

    Readings. alpha is what makes alpha / (n (1 - p)) the configured learning rate, alpha = lr n (1 - p), so that a
    local step is that of the other methods; an aggregation step then goes lr lambda (1 - p) / p of the way to the
    mean, which the paper's alpha keeps within 1/2. f_i is sampled in minibatches; the paper has its full gradient.
    Aggregations before the first local step are left out: nothing has been averaged yet. The number of local steps
    is drawn, 1/p on average; `training.epochs` and `training.steps` have no effect on it. Batch-norm statistics that
    are averaged move as the weights do.

    Newcomers: x_i begins as the mean and takes the local steps of a round; ours, the paper has a fixed set of clients.

    The method needs all clients in every round. With `prox_weight: 0` it is Local with passes of the drawn
    lengths, bit for bit.
    """

    summary: ClassVar[str] = "personal models drawn to their mean, when a coin says so"
    paper: ClassVar[str] = "Hanzely and Richtarik, 2020"
    search: ClassVar = {"prox_weight": (0.01, 10.0, "log")}
    any_task: ClassVar[bool] = True
    partial_work: ClassVar[bool] = False  # the steps between two averages are drawn for all clients alike
    frozen_head: ClassVar[bool] = True
    message: ClassVar[str] = "mean"
    state: ClassVar[str] = "mean"

    prox_weight: Annotated[float, Field(ge=0, description="how strongly models are drawn to their mean (lambda)")] = 1.0
    aggregation_probability: Annotated[
        float, Field(gt=0, lt=1, description="probability that a step goes to the mean instead of training (p)")
    ] = 0.2

    def check(self, task: Task, participants: int) -> None:
        if participants < task.num_clients:
            raise ConfigError(
                f"L2GD throws one coin for all clients and needs them all in every round; training.participation = "
                f"{task.training.participation} gives {participants} of {task.num_clients}; set it to 1"
            )
        share = self.share(task.training.lr)
        if share > 0.5:
            raise ConfigError(
                f"an aggregation step of L2GD goes lr * prox_weight * (1 - p) / p = {share:.3g} of the way to the mean "
                f"and must keep within 0.5; lower algorithm.prox_weight = {self.prox_weight} or training.lr = "
                f"{task.training.lr}, or raise algorithm.aggregation_probability = {self.aggregation_probability}"
            )

    def share(self, lr: Rate) -> Rate:
        """alpha lambda / (n p), the share of the way to the mean of one aggregation step."""
        return lr * self.prox_weight * (1 - self.aggregation_probability) / self.aggregation_probability

    def runs(self, task: Task, round: int) -> tuple[int, int]:
        """The numbers of aggregation steps and of local steps that follow them in a round, for all clients."""
        coin = stream(task.seed, round, -1, "coin")
        local_steps = int(coin.geometric(self.aggregation_probability))
        aggregations = int(coin.geometric(1 - self.aggregation_probability))
        return (0 if round == 1 else aggregations), local_steps

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"model": Mean(self.to_share(task, task.like()), by="clients")}

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        return {"train": Pass(steps=self.runs(task, round)[1])}

    def init_client(self, task: Task) -> Tree:
        return {"model": task.init()}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        keep = (1 - self.share(data.learning_rate)) ** self.runs(task, data.round)[0]
        own, mean = part(client, "model"), down["mean"]
        mixed = tree.mix(lambda entry, center: keep * entry + (1 - keep) * center, only(own, tuple(mean)), mean)
        model = train(task, {**own, **mixed}, data.passes["train"], model_loss(task), data.learning_rate)
        return {"model": model}, {"model": self.to_share(task, model)}

    def begin_as_newcomer(self, task: Task, client: Tree, down: Messages) -> Tree:
        return {"model": {**part(client, "model"), **down["mean"]}}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        return {"mean": up["model"]}

    def personal(self, task: Task) -> Personal:
        return Kept("model")
