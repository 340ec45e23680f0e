"""FedGH: the server trains one head on everybody's class means; it replaces the heads of all clients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from pflmpi.algorithms.base import Round
from pflmpi.algorithms.prototypes import train_head
from pflmpi.algorithms.shared_parts import SharedHead
from pflmpi.learning.client import ClientData, class_means
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import ClassMeans, Messages, Uplink
from pflmpi.tree import Tree, part


@dataclass(frozen=True, kw_only=True)
class FedGH(SharedHead):
    """Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM Multimedia 2023.

    Client: replaces its head by the global one, h_i <- h_g; trains body and head together with cross-entropy; uploads
    the mean feature c_ij of each class j that it holds. Server: for every uploaded pair (c_ij, j)

        h_g <- h_g - eta grad CE(h_g(c_ij), j).

    Up: label and mean of each class held, |S| (4 d + 4) bytes. Down: h_g (shared). Persists: client: its body (and its
    batch-norm statistics, which never travel); server: h_g. Evaluated: the fresh h_g on the client's own body.

    Readings. The pairs come in a seeded shuffle, one epoch a round, a step for every pair as in the
    authors' code; `server_batch_size: null` takes the batch size of the clients, as other implementations do. The
    server's steps are plain SGD with a learning rate that does not decay.

    Newcomers: bodies never travel, so theirs is trained from the initial weights, with the head h_g to begin with, and
    put under h_g as everybody's; ours, the paper has no clients that join later.
    """

    summary: ClassVar[str] = "one head trained on all class means replaces the clients' heads"
    paper: ClassVar[str] = "Yi et al., ACM Multimedia 2023"
    search: ClassVar = {"global_head_lr": (0.001, 1.0, "log")}
    linear_head: ClassVar[bool] = True

    global_head_lr: Annotated[
        float, Field(gt=0, description="learning rate of the global head, on the server (eta)")
    ] = 0.01
    server_epochs: Annotated[int, Field(ge=1, description="passes of the server over the class means in a round")] = 1
    server_batch_size: Annotated[
        int | None, Field(ge=1, description="class means in a step of the server; null: all")
    ] = 1

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"means": ClassMeans(task.num_features, counts=False)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        kept, _ = super().client_update(task, client, down, data)
        return kept, {"means": class_means(task, kept, data)}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        head = train_head(
            part(server, "head"),
            up["means"],
            round.stream("server head"),
            lr=self.global_head_lr,
            epochs=self.server_epochs,
            batch_size=self.server_batch_size or task.training.batch_size,
        )
        return {"head": head}
