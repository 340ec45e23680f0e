"""FeSEM: several global models, each the mean of the clients nearest to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, Algorithm, Round, only
from pflmpi.algorithms.distances import inner_products, squared_distances, weighted_sums
from pflmpi.errors import ConfigError
from pflmpi.learning.client import ClientData, model_loss
from pflmpi.learning.diagnostics import Category, Diagnostic
from pflmpi.learning.personal import Kept, Merge, Personal, Received
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Downlink, Messages, Own, Rows, Uplink, tensor
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class FeSEM(Algorithm):
    """Xie et al., Multi-Center Federated Learning: Clients Clustering for Better Personalization, WWW Journal 2023.

    Client: local SGD from the centre of its cluster. Server, once per round: E-step, a participant is assigned to the
    nearest centre, r_i = argmin_k ||w_i - W_k||_2; M-step, W_k = mean of its members.

    Up: the model, and with `weighting: samples` the number of samples. Down: the client's own centre. Persists:
    server: the K centres and every client's cluster (-1 before it has one); client: nothing, or its batch-norm
    statistics with `training.bn: local`. Evaluated: the centre of the client's cluster.

    Readings. The initial centres are models of participants: after the training of the first round K of them are drawn
    by k-means++, each with a probability proportional to its squared distance from those already drawn. The mean is
    plain; `weighting: samples` weights by n_i. Of equally near centres the first is taken. A centre without members
    does not change.

    Departures. With partial participation only the round's participants are members, and the others keep their cluster.
    A client without a cluster receives the mean of the centres, weighted by their numbers of clients. Distances are
    over the parameters; batch-norm statistics are averaged with them (`bn: average`) or stay with the client.

    Newcomers: have no cluster and predict with the same mean of the centres; ours, the paper has a fixed set of
    clients.
    """

    summary: ClassVar[str] = "K global models, each client trains and uses the nearest"
    paper: ClassVar[str] = "Xie et al., WWW Journal 2023"
    any_task: ClassVar[bool] = True
    frozen_head: ClassVar[bool] = True
    predicts_with: ClassVar[tuple[str, ...]] = ("centre",)

    num_clusters: Annotated[int, Field(ge=1, description="clusters of clients, each with a model (K)")] = 3
    weighting: Annotated[
        Literal["clients", "samples"],
        Field(description="the mean over clients is by their samples, or plain over clients"),
    ] = "clients"

    def check(self, task: Task, participants: int) -> None:
        if self.num_clusters > participants:
            raise ConfigError(
                f"algorithm.num_clusters = {self.num_clusters}, but the first centres are drawn from the participants "
                f"of a round, which are {participants}; choose at most that, or a larger training.participation"
            )
        stats = tree.leaves(only(task.like(), task.shared_stats))
        if integers := [path for path, leaf in stats if not leaf.is_floating_point()]:
            raise ConfigError(
                f"model {task.architecture.name} has {integers[0]} of integers, of which fesem can make no mean; "
                "choose training.bn = local, with which it stays with the client"
            )

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        up: dict[str, Uplink] = {"model": Rows(task.like("body", "head", *task.shared_stats))}
        if self.weighting == "samples":
            up["samples"] = Rows({"count": tensor(dtype=torch.int32)})
        return up

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        return {"centre": Own(task.like("body", "head", *task.shared_stats))}

    def init_server(self, task: Task) -> Tree:
        model = only(task.init(), (*TRAINED_PARTS, *task.shared_stats))
        return {"centres": tree.stack([model] * self.num_clusters), "cluster": torch.full((task.num_clients,), -1)}

    def init_client(self, task: Task) -> Tree:
        return only(task.init(), task.local_stats)

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return self._centres(server, leaf(server, "cluster")[torch.from_numpy(receivers)])

    def publish_to_newcomers(self, task: Task, server: Tree, newcomers: np.ndarray) -> Messages:
        return self._centres(server, torch.full((len(newcomers),), -1))

    def _centres(self, server: Tree, clusters: Tensor) -> Messages:
        """The centre of each receiver's cluster [R]; for those without one (-1) the mean weighted by clients."""
        sizes = _members(leaf(server, "cluster"), self.num_clusters).sum(1, keepdim=True).mT
        sizes = sizes if sizes.any() else torch.ones_like(sizes)

        def select(centres: Tensor) -> Tensor:
            with_mean = torch.cat([centres, weighted_sums(sizes / sizes.sum(), centres)])
            return with_mean.index_select(0, clusters % len(with_mean))  # -1 is the mean

        return {"centre": tree.map(select, part(server, "centres"))}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        model = train(task, {**down["centre"], **client}, data.passes["train"], model_loss(task), data.learning_rate)
        up: Messages = {"model": only(model, (*TRAINED_PARTS, *task.shared_stats))}
        if self.weighting == "samples":
            up["samples"] = {"count": data.num_samples.to(torch.int32)}
        return only(model, task.local_stats), up

    def after_training(self, task: Task, down: Messages, up: Messages) -> Messages:
        return {**down, "centre": up["model"]}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        """E-step and M-step on the models of the P participants, followed by the K previous centres."""

        def compare(rows: Tensor, old: Tensor) -> Tensor:
            return inner_products(torch.cat([rows, old]), from_first=True)

        models, centres = {**up["model"]}, part(server, "centres")
        products = tree.map(compare, only(models, TRAINED_PARTS), only(centres, TRAINED_PARTS))
        clusters, previous = self._assign_clusters(products, round)
        weights = self._weights(up, clusters, previous)
        cluster = leaf(server, "cluster").index_copy(0, torch.from_numpy(round.participants), clusters)
        return {
            "centres": tree.map(lambda rows, old: weighted_sums(weights, torch.cat([rows, old])), models, centres),
            "cluster": cluster,
        }

    def _weights(self, up: Messages, clusters: Tensor, previous: Tensor) -> Tensor:
        """The weight [K, P + K] of each model in each new centre; a centre without members stays as it is."""
        weights = _members(clusters, self.num_clusters)
        if self.weighting == "samples":
            weights = weights * leaf(up["samples"], "count")
        total = weights.sum(1, keepdim=True)
        weights = torch.nn.functional.pad(weights / total.clamp(min=1), (0, self.num_clusters))
        empty = total.flatten() == 0
        weights[empty, previous[empty]] = 1
        return weights

    def _assign_clusters(self, products: Tree, round: Round) -> tuple[Tensor, Tensor]:
        """The cluster of each participant [P], and the indices [K] of the previous centres among P + K models."""
        count = len(round.participants)
        centres = torch.arange(count, count + self.num_clusters)
        if round.number == 1:
            distances = squared_distances(products)[:count, :count]
            centres = torch.tensor(self.seeds(distances, round.stream("centres")))
        return squared_distances(products, centres)[:count].argmin(1), centres

    def seeds(self, distances: Tensor, rng: np.random.Generator) -> list[int]:
        """The indices of K first centres by k-means++, from the distances ||w_i - w_j||^2 [P, P] of all models."""
        chosen: list[int] = []
        odds = np.ones(len(distances))
        for _ in range(self.num_clusters):
            # The largest of odds over exponential numbers: each wins with a probability proportional to its odds.
            chosen.append(int(np.argmax(odds / rng.exponential(size=len(odds)))))
            odds = distances[:, chosen].numpy().min(1)
        return chosen

    def personal(self, task: Task) -> Personal:
        return Merge((Received("centre"), Kept()))

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        return {
            "clusters": Category(
                title="Cluster of each client",
                caption="The cluster whose centre was nearest to the client's model when it last took part.",
                server="cluster",
                count=self.num_clusters,
            )
        }


def _members(cluster: Tensor, num_clusters: int) -> Tensor:
    """Membership of clients in clusters, [K, P] (float64), from the cluster of each client [P]."""
    return (torch.arange(num_clusters).unsqueeze(1) == cluster).double()
