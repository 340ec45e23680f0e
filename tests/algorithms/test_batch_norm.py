"""Batch norm and integer buffers under every algorithm's local objective."""

import dataclasses

import numpy as np
import pytest
import torch

import comparisons
import quick_run
import small_task
from comparisons import state_of
from every_algorithm import every_algorithm
from pflmpi import tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.errors import ConfigError
from pflmpi.messages.kinds import Own, Sum

# Algorithms that send no statistics: means of classes, a head, or models that are compared without them.
STATISTICS_STAY = {"fedamp", "fedbn", "fedfcd", "fedgh", "fedgmh", "fedproto", "lgfedavg", "local", "pfedcfr", "pfedpm"}


@pytest.mark.parametrize("bn", ["average", "local"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_local_training_is_in_training_mode_and_moves_the_statistics(name, bn):
    task, algorithm = comparisons.with_batch_norm(bn=bn), ALGORITHMS[name]()
    client, kinds = algorithm.init_client(task), algorithm.downlink(task)
    published = algorithm.publish(task, algorithm.init_server(task), np.arange(1))
    down = {key: tree.row(one, 0) if isinstance(kinds[key], Own) else one for key, one in published.items()}
    for key, kind in kinds.items():
        if isinstance(kind, Own) and kind.of:  # of nobody
            down[key] = tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), kind.like) | down[key]
    down |= algorithm.init_received(task)
    batch = dataclasses.replace(small_task.batch(0), key=torch.tensor(1))
    passes = {one: [batch] for one in algorithm.passes(task, 1)}
    state, up = algorithm.client_update(task, client, down, comparisons.data_of(passes))
    before = tree.at(task.init(), "stats/mean")
    moved = {
        path: not torch.equal(leaf, before)
        for path, leaf in tree.leaves({"state": state, "up": up})
        if path.endswith("stats/mean")
    }
    moved.pop("state/before/stats/mean", None)  # FedFomo's: the model that training started from
    assert moved and all(moved.values()), moved

    sent = {name: kind.like for name, kind in algorithm.uplink(task).items() if isinstance(kind, Sum)}
    assert all(tree.differences(up[name], like) == [] for name, like in sent.items() if name in up)
    travel, stay = (any(path.endswith("stats/mean") for path, _ in tree.leaves(part)) for part in (sent | up, state))
    assert travel == (bn == "average" and name not in STATISTICS_STAY) and (travel or stay)
    assert not travel or "stats" not in state or name == "pfedafe"  # which mixes them with its own
    assert tree.differences(state, client) == []
    assert algorithm.predict(task, state, down, small_task.batch(9).x).shape[1] == small_task.CLASSES


NET = """
import torch
from torch import nn


class Turning(nn.Module):
    \"""Looks at its features in an order that turns in every step.\"""

    def __init__(self, num_classes):
        super().__init__()
        self.first, self.last = nn.Linear(64, 9), nn.Linear(9, num_classes)
        self.register_buffer("order", torch.arange(9))
        self.register_buffer("turned", torch.tensor(False))

    def forward(self, x):
        if self.training:
            self.order.copy_(self.order.roll(1))
            self.turned.fill_(True)
        return self.last(torch.relu(self.first(x.flatten(1))[:, self.order]))
"""
MIXING = ("apfl", "l2gd", "pfedafe", "fedfomo", "fedavg")


@pytest.mark.parametrize("case", MIXING)
def test_what_is_not_floating_is_never_mixed(case, tmp_path):
    (tmp_path / "net.py").write_text(NET)
    model = {"name": f"{tmp_path}/net.py:Turning", "head": "last"}
    raw = quick_run.settings(every_algorithm()[case], model=model, runtime={"executor": "loop"})
    quick_run.run(raw, tmp_path / "run")
    orders = {path: array for path, array in state_of(tmp_path / "run").items() if path.endswith("order")}
    assert orders
    for path, array in orders.items():
        assert np.array_equal(np.sort(array), np.broadcast_to(np.arange(9), array.shape)), path
    assert any(not np.array_equal(row, np.arange(9)) for array in orders.values() for row in array.reshape(-1, 9))


def test_centres_of_integers_are_refused_and_no_others(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    model = {"name": f"{tmp_path}/net.py:Turning", "head": "last"}
    raw = quick_run.settings(algorithm={"name": "fesem"}, model=model, runtime={"executor": "loop"})
    with pytest.raises(ConfigError, match=r"of integers, of which fesem can make no mean; choose training.bn = local"):
        quick_run.run(raw, tmp_path / "run")
    quick_run.run({**raw, "training": {**raw["training"], "bn": "local"}}, tmp_path / "local")
