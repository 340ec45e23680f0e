"""FedBN: batch norms that stay with the client, under a model that is averaged."""

from dataclasses import dataclass
from typing import ClassVar

from pflmpi import tree
from pflmpi.algorithms.shared_parts import ClientWeighting, PersonalPaths
from pflmpi.errors import ConfigError
from pflmpi.learning.task import Task


@dataclass(frozen=True, kw_only=True)
class FedBN(PersonalPaths):
    """Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

    Algorithm 1: clients train the whole model; the server averages every layer but the batch norms, of which neither
    scale and shift nor running statistics ever leave a client (`training.bn` changes nothing).

    Up: the model without its batch norms (mean). Down: the same (shared). Persists: server: that model; client: its
    batch norms, with their statistics. Evaluated: the fresh model with the client's batch norms.

    Readings. A batch norm is a layer with a running mean; a model without one is refused, since nothing would differ
    from FedAvg. The mean over the participants is plain, 1/K, as in algorithm 1 (`weighting: samples` for n_k / n).

    Newcomers: new batch norms, trained for the local epochs in the shared model, which stays as it is, since that is
    what they are evaluated in; ours.
    """

    summary: ClassVar[str] = "one averaged model, personal batch norms"
    paper: ClassVar[str] = "Li et al., ICLR 2021"
    frozen_head: ClassVar[bool] = True
    predicts_with: ClassVar[tuple[str, ...]] = ("model",)

    weighting: ClientWeighting = "clients"

    def check(self, task: Task, participants: int) -> None:
        if not _batch_norms(task):
            raise ConfigError(
                f"FedBN keeps the batch norms of a model with its clients, and model {task.architecture.name} has "
                "none; choose a model with batch norm, such as resnet18, or algorithm fedavg"
            )

    def kept(self, task: Task) -> tuple[str, ...]:
        layers = task.layers
        return (*(path for layer in _batch_norms(task) for path in layers.get(layer, ())), *task.like("stats"))


def _batch_norms(task: Task) -> list[str]:
    """Paths of the layers with a running mean."""
    stats = tree.leaves(task.like("stats"))
    owners = (path.rpartition("/") for path, _ in stats)
    return [owner.replace("stats", "body", 1) for owner, _, name in owners if name == "running_mean"]
