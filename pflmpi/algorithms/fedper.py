"""FedPer: a shared body, a personal head."""

from dataclasses import dataclass
from itertools import chain
from typing import Annotated, ClassVar

from pydantic import Field

from pflmpi.algorithms.shared_parts import PersonalPaths
from pflmpi.errors import ConfigError
from pflmpi.learning.task import Task


@dataclass(frozen=True, kw_only=True)
class FedPer(PersonalPaths):
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

    message: ClassVar[str] = "body"
    state: ClassVar[str] = "shared"

    personal_parts: ClassVar[bool] = True

    personal_layers: Annotated[
        int, Field(ge=1, description="last layers that stay with a client, the head among them (K_P)")
    ] = 1

    def kept(self, task: Task) -> tuple[str, ...]:
        if not task.personal:
            return ("head", *self._layers_before_head(task), *task.local_stats)
        if self.personal_layers != 1:
            raise ConfigError(
                f"algorithm.personal_layers = {self.personal_layers} and model.personal both say what stays with a "
                "client; leave one of them out"
            )
        return (*task.personal, *task.local_stats)

    def _layers_before_head(self, task: Task) -> tuple[str, ...]:
        """Paths of the parameters of the personal layers but the last one."""
        layers = list(task.layers)
        if self.personal_layers > (most := max(len(layers) - 1, 1)):
            raise ConfigError(
                f"algorithm.personal_layers = {self.personal_layers} leaves nothing to share of model "
                f"{task.architecture.name}, whose layers are {', '.join(layers)}; choose at most {most}"
            )
        return tuple(chain.from_iterable(task.layers[layer] for layer in layers[-self.personal_layers : -1]))
