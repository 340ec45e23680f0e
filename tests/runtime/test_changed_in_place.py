"""What an algorithm is given it only reads: a change of it in place is refused by name, in both executors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import quick_run
from pflmpi import tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.fedper import FedPer
from pflmpi.errors import AlgorithmError
from pflmpi.learning.client import ClientData
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.tree import Tree

Change = Callable[[Tree, Messages, ClientData], None]


def change_batch(name):
    def change(client, down, data):
        for batch in data.passes["train"]:
            getattr(batch, name).add_(1).sub_(1)

    return change


def change_copies(client, down, data):
    for _, leaf in tree.leaves(tree.clone({**client, **down})):
        leaf.add_(1)
    counts = data.class_counts.clone()
    counts += 1


CHANGES: dict[str, tuple[Change, str]] = {
    "its state": (lambda client, down, data: tree.at(client, "head/bias").add_(1), "client/head/bias"),
    "a message": (lambda client, down, data: tree.at(down["body"], "body/fc1/bias").mul_(0), "down/body/body/fc1/bias"),
    "class counts": (lambda client, down, data: data.class_counts.add_(1), "data.class_counts"),
}
BATCHES = {"samples": (change_batch("x"), "batch.x"), "labels": (change_batch("y"), "batch.y")}


def run(change, executor, folder, monkeypatch, ranks=1):
    class Changing(FedPer):
        def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
            change(client, down, data)
            return super().client_update(task, client, down, data)

    monkeypatch.setitem(ALGORITHMS._objects, "changing", Changing)
    raw = quick_run.settings(algorithm={"name": "changing"}, runtime={"executor": executor, "lanes": 3})
    return quick_run.run(raw, folder, ranks)


@pytest.mark.parametrize("what", [*CHANGES, *BATCHES])
def test_a_tensor_that_was_given_is_not_changed(what, tmp_path, monkeypatch):
    change, path = (CHANGES | BATCHES)[what]
    with pytest.raises(AlgorithmError, match=rf"Changing.client_update \(round 1, client \d.* changes {path} in place"):
        run(change, "loop", tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("what", CHANGES)
def test_nor_in_lanes(what, tmp_path, monkeypatch):
    with pytest.raises(AlgorithmError, match=r"Changing.client_update \(round.* in place") as caught:
        run(CHANGES[what][0], "lanes", tmp_path / "run", monkeypatch)
    assert "runtime.executor" not in str(caught.value)  # no way out


def test_copies_may_be_changed(tmp_path, monkeypatch):
    found = {run(change_copies, "loop", tmp_path / str(ranks), monkeypatch, ranks) for ranks in (1, 2)}
    assert len(found) == 1


def test_the_server_publishes_its_state_as_it_is(tmp_path, monkeypatch):
    class Publishing(FedPer):
        def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Any:
            tree.at(server, "shared/body/fc1/bias").add_(torch.ones(()))
            return super().publish(task, server, receivers)

    monkeypatch.setitem(ALGORITHMS._objects, "publishing", Publishing)
    with pytest.raises(AlgorithmError, match=r"Publishing.publish .* changes server/shared/body/fc1/bias in place"):
        quick_run.run(quick_run.settings(algorithm={"name": "publishing"}), tmp_path / "run")
