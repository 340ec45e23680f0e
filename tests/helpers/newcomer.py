"""An algorithm that the package has never heard of: a personal model of many parts, every kind of diagnostic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Algorithm, Round, only
from pflmpi.learning.client import ClientData, class_means, model_loss
from pflmpi.learning.diagnostics import Category, ClassVectors, ClientWeights, Diagnostic, EntryShare, PerClient
from pflmpi.learning.personal import Add, Kept, Merge, Mix, NotAModel, Personal, Received
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Downlink, Mean, Messages, Own, Rows, Shared, Uplink
from pflmpi.tree import Tree, leaf, part

NAME = "newcomer"
TEAMS = 3


@dataclass(frozen=True, kw_only=True)
class Newcomer(Algorithm):
    """A client's own model mixed with everybody's body, and an offset from the server added to the head.

    Args:
        one_model: whether the checkpoint says that this is one model.
    """

    summary: ClassVar[str] = "a bit of everything"
    paper: ClassVar[str] = "nobody, nowhere"
    predicts_with: ClassVar[tuple[str, ...]] = ("trunk", "offset")

    one_model: bool = True

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"trunk": Mean(task.like("body", *task.shared_stats)), "head": Rows(part(task.like("head"), "head"))}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        head = part(task.like("head"), "head")
        return {"trunk": Shared(task.like("body", *task.shared_stats)), "offset": Own(head)}

    def init_server(self, task: Task) -> Tree:
        n, head = task.num_clients, part(task.init(), "head")
        return {
            "trunk": only(task.init(), ("body", *task.shared_stats)),
            "heads": tree.map(lambda entry: torch.zeros(n, *entry.shape), head),
            "team": torch.full((n,), -1),
            "liking": torch.zeros(n, n),
            "vectors": torch.zeros(task.num_classes, task.num_features),
        }

    def init_client(self, task: Task, client: int) -> Tree:
        model = task.init()
        return {
            "mine": model,
            "trust": torch.zeros(()),
            "seen": torch.tensor(False),
            "picked": tree.map(lambda entry: torch.zeros_like(entry, dtype=torch.bool), part(model, "head")),
            "friends": {
                "ids": torch.tensor([(client + 2) % task.num_clients, -1]),
                "weights": torch.tensor([1.0, 0.0, 0.0]),
            },
            "classes": {
                "means": torch.zeros(task.num_classes, task.num_features),
                "held": torch.zeros(task.num_classes, dtype=torch.bool),
            },
        }

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        rows = torch.from_numpy(receivers)
        return {
            "trunk": part(server, "trunk"),
            "offset": tree.map(lambda heads: (heads.mean(0) - heads[rows]) / 4, part(server, "heads")),
        }

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        own_model = part(client, "mine")
        model = train(task, own_model, data.passes["train"], model_loss(task), data.learning_rate)
        before, after = part(own_model, "head"), part(model, "head")
        trust = data.class_counts.max() / data.num_samples
        state: Tree = {
            "mine": model,
            "trust": trust,
            "seen": torch.ones_like(leaf(client, "seen")),
            "picked": tree.map(lambda old, new: new > old, before, after),
            "friends": {
                "ids": leaf(part(client, "friends"), "ids"),
                "weights": torch.stack([trust, 1 - trust, torch.zeros_like(trust)]),
            },
            "classes": {"means": leaf(class_means(task, model, data), "means"), "held": data.holds},
        }
        return state, {"trunk": only(model, ("body", *task.shared_stats)), "head": after}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        rows = torch.from_numpy(round.participants)
        return {
            "trunk": up["trunk"],
            "heads": tree.map(lambda old, new: old.index_copy(0, rows, new), part(server, "heads"), up["head"]),
            "team": leaf(server, "team").index_copy(0, rows, (rows + round.number) % TEAMS),
            "liking": leaf(server, "liking").index_add(0, rows, torch.eye(task.num_clients)[rows.roll(1)]),
            "vectors": torch.ones_like(leaf(server, "vectors")).cumsum(0) * round.number,
        }

    def closeness(self, up: Messages) -> Tensor:
        """How close the biases of the participants' heads are, [P, P]."""
        return torch.exp(-torch.cdist(leaf(up["head"], "bias").double(), leaf(up["head"], "bias").double()))

    def personal(self, task: Task) -> Personal:
        mixed = Mix(Kept("mine"), Received("trunk"), share="trust", times=0.5)
        model = Add(Merge((mixed, Kept("mine/head", at="head"))), Received("offset", at="head"))
        return model if self.one_model else NotAModel("what it likes best", nearest=model)

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        if self.one_model:
            return super().predict(task, client, down, x)
        return task.predict(part(client, "mine"), x)

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        return {
            "trust": PerClient(title="Trust", caption="Trust in itself", kept="trust", known="seen", limits=(0.0, 1.0)),
            "distance": PerClient(title="Distance", caption="From the others.", unit="m"),
            "team": Category(title="Team", server="team", count=TEAMS),
            "picked": EntryShare(title="Picked entries", caption="Those that grew.", kept="picked"),
            "friends": ClientWeights(title="Friends", kept="friends/weights", clients="friends/ids", limits=(0.0, 1.0)),
            "liking": ClientWeights(title="Liking", server="liking"),
            "closeness": ClientWeights(title="Closeness", caption="Of two heads."),
            "class_points": ClassVectors(
                title="Class points", server="vectors", kept="classes/means", kept_known="classes/held"
            ),
        }

    def diagnose(self, task: Task, server: Tree, up: Messages, round: Round) -> Mapping[str, Tensor]:
        closeness = self.closeness(up)
        return {"distance": closeness.sum(1), "closeness": closeness}


def registered(monkeypatch):
    """Register the algorithm for the time of a test; its section of a configuration."""
    monkeypatch.setitem(ALGORITHMS._objects, NAME, Newcomer)
    return {"name": NAME}
