"""FedRoD: a generic model trained with a balanced loss, and a personal head on top of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.learning.client import Batch, ClientData, cross_entropy
from pflmpi.learning.personal import Add, Kept, Merge, Personal, Received
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree, leaf, part

ABSENT = 1e-8  # samples that a class counts for when the client has none: log 0 would make the loss infinite or NaN


@dataclass(frozen=True, kw_only=True)
class FedRoD(FedAvg):
    """Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022.

    With z = f(x), generic logits g = h_g(z), n_c the client's training samples of class c, sg() what no gradient goes
    through, a client takes steps of

        CE(g + log n, y) + CE(sg(g) + h_i(sg(z)), y),

    the balanced softmax, which alone trains body and generic head, plus the empirical risk of the personal logits,
    which alone trains h_i. Server: FedAvg of body and generic head.

    Up: body and generic head (mean). Down: the same (shared). Persists: server: body and generic head; client: h_i, and
    its batch-norm statistics with `training.bn: local`. Evaluated: the fresh h_g(z) + h_i(z) with the client's h_i, or
    with `predict_with: generic` the fresh h_g(z) alone.

    Readings. Both heads step at once on every minibatch. The exponent of the counts (gamma) is 1; they are over all
    training data, and a class without any counts for next to nothing. h_i starts as a head of the model does and is
    linear; the paper's other form, in which a hypernetwork makes it from the class counts, is not here.

    Newcomers: a new h_i, trained as a participant's, beside the fresh body and generic head. Ours: it is the paper's
    other form that serves new clients without training.
    """

    summary: ClassVar[str] = "a balanced generic model and a personal head beside its own"
    paper: ClassVar[str] = "Chen and Chao, ICLR 2022"
    any_task: ClassVar[bool] = False
    frozen_head: ClassVar[bool] = False

    predict_with: Annotated[
        Literal["personal", "generic"], Field(description="both heads added (personal), or the generic head alone")
    ] = "personal"

    def init_client(self, task: Task) -> Tree:
        return {**super().init_client(task), "personal": task.init()["head"]}

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        return {"train": {**super().trainings(task)["train"], "personal": part(task.like(), "head")}}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        def loss(model: Tree, batch: Batch) -> Tensor:
            z = task.features(model, batch.x, training=True)
            generic = task.logits(part(model, "head"), z)
            personal = generic.detach() + task.logits(part(model, "personal"), z.detach())
            return cross_entropy(generic + leaf(model, "prior"), batch) + cross_entropy(personal, batch)

        prior: Tree = {"prior": (data.class_counts + ABSENT).log()}
        model = train(task, {**down["model"], **client}, data.passes["train"], loss, data.learning_rate, fixed=prior)
        return self.to_keep(task, model), {"model": self.to_share(task, model)}

    def personal(self, task: Task) -> Personal:
        model = Merge((Received("model"), Kept()))
        return model if self.predict_with == "generic" else Add(model, Kept("personal", at="head"))

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        model: Tree = {**down["model"], **client}
        z = task.features(model, x)
        generic = task.logits(part(model, "head"), z)
        return generic if self.predict_with == "generic" else generic + task.logits(part(model, "personal"), z)
