"""Algorithms whose clients fine-tune the received model before evaluation; FedAvg with fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pflmpi.algorithms.shared_parts import WeightedSharedParts
from pflmpi.errors import ConfigError
from pflmpi.learning.client import ClientData, model_loss
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FineTuned(WeightedSharedParts):
    """A model, or a part of it, is averaged; clients fine-tune it on their own data for evaluation only."""

    adapts_with: ClassVar[tuple[str, ...]] = ("fine_tuning",)
    any_task: ClassVar[bool] = True

    fine_tuning_epochs: Annotated[int, Field(ge=1, description="epochs of fine-tuning before a test")] = 5
    fine_tuned: Annotated[Literal["model", "head", "body"], Field(description="what fine-tuning changes")] = "model"

    def check(self, task: Task, participants: int) -> None:
        if self.fine_tuned != "model" and not task.like()["body"]:
            raise ConfigError(
                f"algorithm.fine_tuned = {self.fine_tuned}, and beside its head model {task.architecture.name} has "
                "nothing to train; set it to model, or choose another model"
            )

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        return {"train": Pass(), "fine_tuning": Pass(epochs=self.fine_tuning_epochs)}

    def adapt(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        frozen = {"model": (), "head": ("body",), "body": ("head",)}[self.fine_tuned]
        start = self.whole(client, down[self.message])
        return train(task, start, data.passes["fine_tuning"], model_loss(task), data.learning_rate, frozen=frozen)


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(FineTuned):
    """Collins et al., FedAvg with Fine Tuning: Local Updates Lead to Representation Learning, NeurIPS 2022.

    FedAvg (algorithm 1); to be tested, a client takes `fine_tuning_epochs` epochs of the configured steps on its own
    training samples from the global model.

    Up: the model (mean). Down: the model (shared). Persists: server: the model; client: nothing, or its batch-norm
    statistics with `training.bn: local`. Evaluated: the fine-tuned model, which is not kept.

    Readings. At which rate: that of the round. The paper fine-tunes the whole model for ten epochs, and compares with
    the head alone (`fine_tuned: head`).

    Newcomers: the global model, fine-tuned as for everybody; this is what the paper tests.
    """

    summary: ClassVar[str] = "FedAvg, fine-tuned by each client to be tested"
    paper: ClassVar[str] = "Collins et al., NeurIPS 2022"
    predicts_with: ClassVar[tuple[str, ...]] = ("model",)

    fine_tuning_epochs: Annotated[int, Field(ge=1, description="epochs of fine-tuning before a test")] = 10
