"""FedALA: a client starts from a mix of its own and the global model, with learned weights for each entry."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.shared_parts import MeanBy, SharedParts
from pflmpi.errors import ConfigError
from pflmpi.learning.client import Batch, ClientData, model_loss
from pflmpi.learning.personal import Kept, Personal
from pflmpi.learning.sgd import gradient, train, until
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree, leaf, part

_WINDOW = 10  # last losses whose standard deviation decides whether the weights have converged


@dataclass(frozen=True, kw_only=True)
class FedALA(SharedParts):
    """Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023.

    Equation 4: a client starts from its last model plus the global update in measure, entry by entry: theta_i +
    (theta - theta_i) * W_i in the `adaptive_layers` highest layers (p) and theta in the lower ones. Equation 5: W_i,
    ones at first, is trained by gradient descent, W_i <- W_i - eta dL/dW_i with dL/dW_i = (theta - theta_i) * dL/dtheta
    at the mix, on a random share of its data (s), and clipped to 0..1: the second time the client takes part until the
    loss has converged, from then on for one epoch (algorithm 1). Then it trains all parameters as in FedAvg; the server
    averages with weights k_i / sum k.

    Up: the model (mean by samples). Down: the model (shared). Persists: server: the model; client: its model, W_i, and
    how many passes are due for W_i. Evaluated: the client's model after its local training.

    Readings. In its first participation a client has no model of its own and starts from the global one. As in the
    authors' code, W_i has converged once the last 10 losses have a standard deviation below `threshold`; here a loss is
    the mean over an epoch, in their code that of its last batch, and training of W_i ends after `longest` epochs at the
    latest. The share of the data is a random subset drawn every round; the authors' code takes a random stretch of the
    stored samples. A layer is weight and bias together; the authors count tensors, so that their 2 is our 1. The
    authors' code mixes the global model into every client's before a test; here a client is tested with the model that
    its last training left, as with the other algorithms.

    Newcomers: train as in a first participation, from the global model; ours, the paper has no clients that join later.
    """

    summary: ClassVar[str] = "own and global model mixed, a learned weight for each entry"
    paper: ClassVar[str] = "Zhang et al., AAAI 2023"
    search: ClassVar = {"weight_lr": (0.1, 10.0, "log")}
    any_task: ClassVar[bool] = True

    adaptive_layers: Annotated[int, Field(ge=1, description="p, highest layers that are mixed")] = 1
    share: Annotated[float, Field(gt=0, le=1, description="s, share of the data that trains the weights")] = 0.8
    weight_lr: Annotated[float, Field(gt=0, description="eta, learning rate of the weights")] = 1.0
    threshold: Annotated[float, Field(gt=0, description="standard deviation of losses at which they converged")] = 0.1
    longest: Annotated[int, Field(ge=1, description="epochs of the weights' first training, at most")] = 30

    def check(self, task: Task, participants: int) -> None:
        layers = task.layers
        if self.adaptive_layers > len(layers):
            raise ConfigError(f"algorithm.adaptive_layers = {self.adaptive_layers}: the model has {len(layers)} layers")

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        first = Pass(epochs=1, share=self.share, times="again")
        later = Pass(epochs=1, share=self.share, times="start")
        return {"train": Pass()} | {f"weights{i}": later if i else first for i in range(self.longest)}

    def averaged_by(self) -> MeanBy:
        return "samples"

    def init_client(self, task: Task) -> Tree:
        model = task.init()
        weights = tree.unflatten({path: torch.ones_like(entry) for path, entry in self._mixed_leaves(task, model)})
        return {"model": model, "weights": weights, "again": torch.tensor(0), "start": torch.tensor(0)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        own, received = part(client, "model"), {**part(client, "model"), **down["model"]}
        weights = self._train_weights(task, part(client, "weights"), own, received, data)
        again = leaf(client, "again")
        model = self._mix(received, own, weights)
        model = tree.map(lambda mixed, entry: torch.where(again > 0, mixed, entry), model, received)
        model = train(task, model, data.passes["train"], model_loss(task), data.learning_rate)
        state: Tree = {"model": model, "weights": weights, "again": torch.ones_like(again), "start": 1 - again}
        return state, {"model": self.to_share(task, model)}

    def personal(self, task: Task) -> Personal:
        return Kept("model")

    def _mixed_leaves(self, task: Task, model: Tree) -> list[tuple[str, Tensor]]:
        """The parameters of the highest layers, by path."""
        highest = tuple(f"{layer}/" for layer in [*task.layers][-self.adaptive_layers :])
        return [(path, entry) for path, entry in tree.leaves(model) if path.startswith(highest)]

    def _mix(self, received: Tree, own: Tree, weights: Tree) -> Tree:
        """Equation 4."""
        entries = dict(tree.leaves(received))
        for path, weight in tree.leaves(weights):
            own_entry = tree.at(own, path)
            entries[path] = own_entry + (entries[path] - own_entry) * weight
        return tree.unflatten(entries)

    def _train_weights(self, task: Task, weights: Tree, own: Tree, received: Tree, data: ClientData) -> Tree:
        """Equation 5, until the loss has converged."""
        loss = model_loss(task)
        change = {path: tree.at(received, path) - tree.at(own, path) for path, _ in tree.leaves(weights)}
        parts = tuple(weights)

        def train_epoch(weights: Tree, batches: Iterable[Batch]) -> tuple[Tree, Tensor]:
            total, count = torch.zeros_like(data.class_counts[0]), torch.zeros_like(data.class_counts[0])
            for batch in batches:
                model = tree.clone(self._mix(received, own, weights))
                grads, value = gradient(task, model, loss, batch, parts)
                step = {path: self.weight_lr * tree.at(grads, path) * change[path] for path in change}
                weights = tree.unflatten(
                    {path: (entry - step[path]).clamp(0, 1) for path, entry in tree.leaves(weights)}
                )
                total, count = total + value, count + batch.active
            return weights, total / count.clamp(min=1)

        def converged(losses: list[Tensor]) -> Tensor:
            spread = torch.stack(losses[-_WINDOW:]).std(correction=0)
            return (spread < self.threshold) & (len(losses) > _WINDOW)

        passes = [data.passes[f"weights{i}"] for i in range(self.longest)]
        return until(task, weights, passes, train_epoch, converged)
