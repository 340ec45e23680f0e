"""FedPer: a shared body, a personal head."""

from dataclasses import dataclass
from itertools import chain
from typing import Annotated, ClassVar

from pydantic import Field

from pflmpi import tree
from pflmpi.algorithms.base import only
from pflmpi.algorithms.shared_parts import WeightedSharedParts
from pflmpi.errors import ConfigError
from pflmpi.learning.client import ClientData, model_loss
from pflmpi.learning.parts import others, overlay, take
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedPer(WeightedSharedParts):
    """Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

    Algorithms 1 and 2: clients train body and head together, upload the body (the base layers), keep the head
    (the personalization layers, K_P = `personal_layers` of them, the last ones; by default the last fully connected
    layer alone); the server averages the bodies with weights n_k / n.

    Up: the body (mean). Down: the body (shared). Persists: server: the body; client: its head, and its batch-norm
    statistics with `training.bn: local`. Evaluated: the fresh body with the client's head.

    Newcomers: a new head, trained for the local epochs on the shared body, which stays as it is, since that is what it
    is evaluated with; ours, the paper has no clients that join later.
    """

    summary: ClassVar[str] = "shared body, personal head"
    paper: ClassVar[str] = "Arivazhagan et al., 2019"
    any_task: ClassVar[bool] = True
    predicts_with: ClassVar[tuple[str, ...]] = ("body",)

    shared: ClassVar[tuple[str, ...]] = ("body",)
    message: ClassVar[str] = "body"
    state: ClassVar[str] = "shared"

    personal_parts: ClassVar[bool] = True

    personal_layers: Annotated[
        int, Field(ge=1, description="last layers that stay with a client, the head among them (K_P)")
    ] = 1

    def to_share(self, task: Task, model: Tree) -> Tree:
        shared = super().to_share(task, model) | (only(model, ("head",)) if task.personal else {})
        return take(shared, others(shared, self._kept(task)))

    def to_keep(self, task: Task, model: Tree) -> Tree:
        kept = super().to_keep(task, model)
        if task.personal:
            kept.pop("head", None)
        return overlay(kept, take(model, self._kept(task)))

    def whole(self, client: Tree, received: Tree) -> Tree:
        return overlay(received, client)

    def _kept(self, task: Task) -> tuple[str, ...]:
        """Paths of the parameters that `model.personal` names, or else of the personal layers before the head."""
        if task.personal:
            if self.personal_layers != 1:
                raise ConfigError(
                    f"algorithm.personal_layers = {self.personal_layers} and model.personal both say what stays with a "
                    "client; leave one of them out"
                )
            return task.personal
        layers = list(task.layers)
        if self.personal_layers > (most := max(len(layers) - 1, 1)):
            raise ConfigError(
                f"algorithm.personal_layers = {self.personal_layers} leaves nothing to share of model "
                f"{task.architecture.name}, whose layers are {', '.join(layers)}; choose at most {most}"
            )
        return tuple(chain.from_iterable(task.layers[layer] for layer in layers[-self.personal_layers : -1]))

    def train_as_newcomer(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
        model, fixed = self.whole(client, down["body"]), tuple(dict(tree.leaves(down["body"])))
        model = train(task, model, data.passes["train"], model_loss(task), data.learning_rate, frozen=fixed)
        return self.to_keep(task, model)
