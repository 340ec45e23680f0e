"""An author's first errors name class, method and what is expected, before a round or in the first one."""

from typing import Any

import numpy as np
import pytest
import torch

import quick_run
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.fedper import FedPer
from pflmpi.errors import PflmpiError
from pflmpi.learning.client import ClientData
from pflmpi.learning.personal import Kept, Merge, Mix, Personal, Received
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree


class FloatState(FedPer):
    def init_client(self, task: Task) -> Tree:
        return {**super().init_client(task), "alpha": 0.5}


class FloatServer(FedPer):
    def init_server(self, task: Task) -> Tree:
        return {**super().init_server(task), "round": 1}


class FloatPublished(FedPer):
    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return {**super().publish(task, server, receivers), "alpha": 0.5}


class FloatSent(FedPer):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        state, up = super().client_update(task, client, down, data)
        return state, {**up, "alpha": 0.5}


class UnknownKept(FedPer):
    def personal(self, task: Task) -> Personal:
        return Merge((Received("body"), Kept("haed", at="head")))


class UnknownShare(FedPer):
    def personal(self, task: Task) -> Personal:
        return Mix(Received("body"), Kept(), share="beta")


class OneForTwo(FedPer):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> Any:
        return {**client, **super().client_update(task, client, down, data)[1]}


class OtherPass(FedPer):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        return client, {"body": data.passes["fine_tuning"]}


class VectorLoss(FedPer):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        def loss(model, batch):
            return torch.nn.functional.cross_entropy(task.predict(model, batch.x), batch.y, reduction="none")

        model = train(task, {**down["body"], **client}, data.passes["train"], loss, data.learning_rate)
        return {name: model[name] for name in client}, {"body": {"body": model["body"]}}


ERRORS = {
    FloatState: r"FloatState.init_client returned alpha = 0.5, a float; expected are tensors .* torch.tensor\(0.5\)",
    FloatServer: r"FloatServer.init_server returned round = 1, a int; expected are tensors .* torch.tensor\(1\)",
    FloatPublished: r"FloatPublished.publish returned alpha = 0.5, a float; expected are tensors",
    FloatSent: r"FloatSent.client_update returned alpha = 0.5, a float; expected are tensors",
    UnknownKept: r"UnknownKept.personal names 'haed', which `init_client` does not return; known: head/bias, head",
    UnknownShare: r"UnknownShare.personal names 'beta', which `init_client` does not return",
    OneForTwo: r"OneForTwo.client_update returned a dict; expected the new state and the messages, two dicts",
    OtherPass: r"OtherPass.client_update .* there is no pass 'fine_tuning'; those that `passes` returns: train",
    VectorLoss: r"VectorLoss.client_update .* the loss has shape \[\d+\]; expected a scalar tensor",
}


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("kind", ERRORS)
def test_it_says_what_is_expected(kind, executor, tmp_path, monkeypatch):
    monkeypatch.setitem(ALGORITHMS._objects, "first", kind)
    raw = quick_run.settings(algorithm={"name": "first"}, runtime={"executor": executor, "lanes": 3})
    with pytest.raises(PflmpiError, match=ERRORS[kind]):
        quick_run.run(raw, tmp_path / "run")
