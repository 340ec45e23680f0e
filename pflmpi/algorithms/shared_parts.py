"""Base classes of algorithms that average some parts of the model and keep the others with each client."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Round, only
from pflmpi.learning.client import ClientData, Loss, model_loss
from pflmpi.learning.parts import overlay, remaining_paths, select_parts
from pflmpi.learning.personal import Kept, Merge, Personal, Received
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Downlink, Mean, Messages, Shared, Uplink
from pflmpi.tree import Tree, part

MeanBy = Literal["samples", "clients"]
ClientWeighting = Annotated[
    MeanBy, Field(description="the mean over clients is by their samples, or plain over clients")
]


@dataclass(frozen=True, kw_only=True)
class SharedParts(Algorithm):
    """Clients train the whole model; the server averages its shared parts and sends them back.

    Batch-norm statistics are shared or kept as `training.bn` says. A client's personal model is what it keeps with what
    it receives.

    Attributes:
        shared: the parts of the model that travel; the others are kept.
        message: their name as a message.
        state: their name in the server's state.
        untrained: parts that local training does not change.
    """

    shared: ClassVar[tuple[str, ...]] = ("body", "head")
    message: ClassVar[str] = "model"
    state: ClassVar[str] = "model"
    untrained: ClassVar[tuple[str, ...]] = ()

    def averaged_by(self) -> MeanBy:
        """Weights of the mean over the participants."""
        return "clients"

    def init_model(self, task: Task) -> Tree:
        """The initial model, with all parts that are shared or kept."""
        return task.init()

    def like_model(self, task: Task) -> Tree:
        """The template of `init_model`."""
        return task.like()

    def to_share(self, task: Task, model: Tree) -> Tree:
        """The parts of a model that travel."""
        return only(model, (*self.shared, *task.shared_stats))

    def to_keep(self, task: Task, model: Tree) -> Tree:
        """The parts of a model that stay with its client."""
        return {name: value for name, value in model.items() if name not in (*self.shared, *task.shared_stats)}

    def whole(self, client: Tree, received: Tree) -> Tree:
        """The model from which local training starts."""
        return {**received, **client}

    def loss(self, task: Task) -> Loss:
        """The local objective."""
        return model_loss(task)

    def fixed(self, received: Tree) -> Tree:
        """Further tensors that the local objective reads, made from the received message; see `train`."""
        return {}

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {self.message: Mean(self.to_share(task, self.like_model(task)), by=self.averaged_by())}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        return {self.message: Shared(self.to_share(task, self.like_model(task)))}

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        excluded = ("stats", *self.untrained)
        return {"train": {name: value for name, value in self.like_model(task).items() if name not in excluded}}

    def init_server(self, task: Task) -> Tree:
        return {self.state: self.to_share(task, self.init_model(task))}

    def init_client(self, task: Task) -> Tree:
        return self.to_keep(task, self.init_model(task))

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return {self.message: part(server, self.state)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        received = down[self.message]
        model, batches = self.whole(client, received), data.passes["train"]
        loss, fixed = self.loss(task), self.fixed(received)
        model = train(task, model, batches, loss, data.learning_rate, frozen=self.untrained, fixed=fixed)
        return self.to_keep(task, model), {self.message: self.to_share(task, model)}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        return {self.state: up[self.message]}

    def personal(self, task: Task) -> Personal:
        return Merge((Received(self.message), Kept()))


@dataclass(frozen=True, kw_only=True)
class SharedHead(SharedParts):
    """Bodies with their batch-norm statistics stay with the clients and may differ; they share one head."""

    predicts_with: ClassVar[tuple[str, ...]] = ("head",)
    unlike_models: ClassVar[bool] = True
    message: ClassVar[str] = "head"
    state: ClassVar[str] = "head"

    def to_share(self, task: Task, model: Tree) -> Tree:
        return part(model, "head")

    def to_keep(self, task: Task, model: Tree) -> Tree:
        return only(model, ("body", "stats"))

    def whole(self, client: Tree, received: Tree) -> Tree:
        return {**client, "head": received}

    def personal(self, task: Task) -> Personal:
        return Merge((Kept(), Received("head", at="head")))


@dataclass(frozen=True, kw_only=True)
class WeightedSharedParts(SharedParts):
    """`SharedParts` with the weights of the mean as an option."""

    weighting: ClientWeighting = "samples"

    def averaged_by(self) -> MeanBy:
        return self.weighting


@dataclass(frozen=True, kw_only=True)
class PersonalPaths(WeightedSharedParts):
    """Clients keep the parts at some paths of the model; everything else is averaged."""

    @abstractmethod
    def kept(self, task: Task) -> tuple[str, ...]:
        """Paths of the parts and parameters that stay with a client."""

    def to_share(self, task: Task, model: Tree) -> Tree:
        return select_parts(model, remaining_paths(model, self.kept(task)))

    def to_keep(self, task: Task, model: Tree) -> Tree:
        return select_parts(model, self.kept(task))

    def whole(self, client: Tree, received: Tree) -> Tree:
        return overlay(received, client)

    def train_as_newcomer(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        received = down[self.message]
        model, fixed = self.whole(client, received), tuple(dict(tree.leaves(received)))
        model = train(task, model, data.passes["train"], model_loss(task), data.learning_rate, frozen=fixed)
        return self.to_keep(task, model)
