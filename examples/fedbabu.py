"""FedBABU, an algorithm that is not in the package: one file against the contract in `pflmpi/algorithms/base.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from pflmpi.algorithms.shared_parts import WeightedSharedParts
from pflmpi.learning.client import ClientData, model_loss
from pflmpi.learning.personal import Kept, Merge, NotAModel, Personal, Received
from pflmpi.learning.sgd import train
from pflmpi.learning.task import SERVER, Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedBABU(WeightedSharedParts):
    """Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.

    Algorithm 1: clients train the body by cross-entropy, theta_ext <- theta_ext - lr grad, and the head with learning
    rate 0, so that it stays as drawn at the start, the same for all. The server averages the bodies with weights
    n_i / n. To be tested, a client fine-tunes the fresh body and that head on its own data for `fine_tuning_epochs`
    (tau_f, 5 in the paper).

    Up: the body (mean). Down: the body (shared). Persists: server: the body; client: the initial head, and its
    batch-norm statistics with `training.bn: local`. Evaluated: the fine-tuned model, which is not kept.

    Readings. What is fine-tuned: the abstract has the head, the authors' code the whole model (the default). At which
    rate: that of the round; the authors' code takes the last of training's, after its steps down. The authors' code
    averages plainly, over clients with as many samples each; `weighting: clients` does that.
    """

    summary: ClassVar[str] = "a shared body under a fixed head, fine-tuned to be tested"
    paper: ClassVar[str] = "Oh et al., ICLR 2022"
    shared: ClassVar[tuple[str, ...]] = ("body",)
    message: ClassVar[str] = "body"
    state: ClassVar[str] = "body"
    predicts_with: ClassVar[tuple[str, ...]] = ("body",)
    adapts_with: ClassVar[tuple[str, ...]] = ("fine_tuning",)

    fine_tuning_epochs: Annotated[int, Field(ge=1, description="epochs of fine-tuning before a test (tau_f)")] = 5
    fine_tuned: Annotated[Literal["model", "head", "body"], Field(description="what fine-tuning changes")] = "model"

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        return {"train": Pass(), "fine_tuning": Pass(epochs=self.fine_tuning_epochs)}

    def init_client(self, task: Task) -> Tree:
        return self.to_keep(task, self.init_model(task.of_client(SERVER)))  # the server's draw: one head for all

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        return {"train": task.like("body")}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        model = train(
            task,
            self.whole(client, down["body"]),
            data.passes["train"],
            model_loss(task),
            data.learning_rate,
            frozen=("head",),
        )
        return self.to_keep(task, model), {"body": self.to_share(task, model)}

    def adapt(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        frozen = {"model": (), "head": ("body",), "body": ("head",)}[self.fine_tuned]
        start = self.whole(client, down["body"])
        return train(task, start, data.passes["fine_tuning"], model_loss(task), data.learning_rate, frozen=frozen)

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        return task.predict(client, x)

    def personal(self, task: Task) -> Personal:
        return NotAModel("a model that it fine-tunes on its own data", nearest=Merge((Received("body"), Kept())))
