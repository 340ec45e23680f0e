"""Clients that have not trained share their first state; what each keeps is as if all had rows of their own."""

import numpy as np
import pytest
import torch

import quick_run
from pflmpi import tree
from pflmpi.algorithms.base import initial_client
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.learning.task import Task
from pflmpi.messages.packing import to_numpy
from pflmpi.runtime.client_rows import empty_rows
from pflmpi.runtime.client_state import allocate, initialise
from pflmpi.tree import Tree
from planned_run import planned

TEMPLATE: Tree = {
    "model": {"weight": torch.empty(3, 2, device="meta"), "bias": torch.empty((), device="meta")},
    "seen": torch.empty(5, dtype=torch.bool, device="meta"),
    "none": {},
    "steps": torch.empty((), dtype=torch.int64, device="meta"),
}
WHO = np.array([2, 3, 7, 8, 20])


def filled():
    """Rows that all begin alike, and the same as whole arrays."""
    rows, whole = empty_rows(WHO, TEMPLATE), {}
    for path, leaf in tree.leaves(TEMPLATE):
        first = torch.arange(1, leaf.numel() + 1).view(1, *leaf.shape).to(leaf.dtype)
        rows.begin(WHO, path, first)
        whole[path] = first.expand(len(WHO), *leaf.shape).clone()
    return rows, whole


def check(rows, whole, chosen):
    at = torch.tensor(chosen)
    found = rows.get(WHO[chosen])
    assert found["none"] == {}
    for path, leaf in tree.leaves(found):
        assert torch.equal(leaf, whole[path][at]) and leaf.is_contiguous(), path
    for path, array in rows.flat(WHO[chosen]).items():
        assert np.array_equal(array, to_numpy(whole[path][at])), path


def test_rows_come_to_life_when_they_are_written():
    rows, whole = filled()
    check(rows, whole, [0, 2, 4])
    assert all(array.strides[0] == 0 for array in rows.flat(WHO).values())
    new = {"model": {"weight": torch.rand(2, 3, 2), "bias": torch.rand(2)}, "seen": torch.ones(2, 5) > 0}
    rows.put(WHO[[1, 3]], new)
    for path, leaf in tree.leaves(new):
        whole[path][[1, 3]] = leaf
    for chosen in ([1], [0], [0, 1], [1, 3], [0, 1, 2, 3, 4], [4, 3]):
        check(rows, whole, chosen)
    assert rows.flat(WHO)["steps"].strides[0] == 0  # was not among what is new
    assert rows.flat(WHO[[0, 2, 4]])["model/weight"].strides[0] == 0
    rows.get(WHO)["model"]["weight"].fill_(7)  # a copy
    check(rows, whole, [0, 1, 2, 3, 4])


def test_clients_that_begin_otherwise_have_rows_of_their_own():
    rows, whole = filled()
    for path, value in (("model/bias", -1.0), ("steps", 9)):
        rows.begin(WHO[1:2], path, torch.full((1,), value, dtype=whole[path].dtype))
        whole[path][1] = value
    rows.begin(WHO[2:], "model/bias", torch.tensor([1.0]))  # as the others
    rows.begin(WHO[3:4], "seen", torch.zeros(1, 5, dtype=torch.bool))
    whole["seen"][3] = False
    check(rows, whole, [0, 1, 2, 3, 4])
    assert {path: np.flatnonzero(own).tolist() for path, own in rows.changed.items()} == {
        "model/bias": [1],
        "model/weight": [],
        "seen": [3],
        "steps": [1],
    }


def test_zeros_of_another_sign_are_not_the_same():
    rows = empty_rows(WHO, {"x": torch.empty((), device="meta")})
    rows.begin(WHO[:1], "x", torch.tensor([0.0]))
    rows.begin(WHO[1:2], "x", torch.tensor([-0.0]))
    assert np.signbit(rows.flat(WHO)["x"]).tolist() == [False, True, False, False, False]


def test_what_was_never_filled_is_zero():
    rows = empty_rows(WHO, TEMPLATE)
    assert all(not leaf.any() for _, leaf in tree.leaves(rows.get(WHO)))
    assert rows.flat(WHO)["model/weight"].strides[0] == 0


class ByClient(FedGMH):
    """Asks what kind of number the client is before it looks at it."""

    def init_client(self, task: Task, client: int) -> Tree:
        known = isinstance(client, int) and client > 0
        return {**super().init_client(task), "number": torch.tensor(client if known else 0)}


@pytest.mark.parametrize("init", ["shared", "per_client"])
@pytest.mark.parametrize("kind", [FedGMH, ByClient])
def test_the_first_state_is_that_of_each_client(kind, init):
    world = planned(quick_run.settings(training={"init": init}), 1)
    algorithm, task, n = kind(), world.setup.task, world.setup.task.num_clients
    template = tree.like(initial_client(algorithm, task, 0))
    population = allocate(np.zeros(n, np.int64), np.arange(n), [template])
    initialise(population, algorithm, [task])
    own = [(task.of_client(client), client)[: 2 if kind is ByClient else 1] for client in range(n)]
    whole = tree.stack([algorithm.init_client(*arguments) for arguments in own])
    for path, leaf in tree.leaves(population.get(np.arange(n))):
        assert torch.equal(leaf, tree.at(whole, path)), path
    if kind is ByClient:
        assert population.get(np.arange(n))["number"].tolist() == [*range(n)]
    changed = population.cohorts[0].changed["model/head/weight"]
    assert changed.any() == (init == "per_client")  # one row, where it is the same for all


def test_a_start_that_is_common_to_all_is_made_once(monkeypatch):
    task, calls = planned(quick_run.settings(), 1).setup.task, []
    plain = FedGMH.init_client
    monkeypatch.setattr(FedGMH, "init_client", lambda self, task: calls.append(1) or plain(self, task))
    population = allocate(np.zeros(50, np.int64), np.arange(50), [tree.like(plain(FedGMH(), task))])
    initialise(population, FedGMH(), [task])
    assert len(calls) == 1


def test_what_begins_alike_is_so_again_after_a_continuation(tmp_path, monkeypatch):
    """3 of 7 clients train in a round."""
    from pflmpi.experiment import run as experiment
    from pflmpi.store import shard

    monkeypatch.setattr(shard, "_ONCE", 1000)
    made = []

    def watched(*arguments):
        made.append(allocate(*arguments))
        return made[-1]

    monkeypatch.setattr(experiment, "allocate", watched)
    whole = quick_run.run(quick_run.settings(training={"rounds": 3}), tmp_path / "whole")
    quick_run.run(quick_run.settings(training={"rounds": 1}), tmp_path / "run")
    assert quick_run.resume(tmp_path / "run", ("training.rounds=3",)) == whole
    first, short, resumed = (one.cohorts[0].changed["model/head/weight"] for one in made)
    assert short.sum() == 3 and 3 < first.sum() < 7 and np.array_equal(first, resumed)
