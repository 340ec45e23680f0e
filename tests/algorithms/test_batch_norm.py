"""Batch norm under every algorithm's local objective."""

import dataclasses

import numpy as np
import pytest
import torch

import comparisons
import small_task
from pflmpi import tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.messages.kinds import Own


@pytest.mark.parametrize("bn", ["average", "local"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_local_training_is_in_training_mode_and_moves_the_statistics(name, bn):
    task, algorithm = comparisons.with_batch_norm(bn=bn), ALGORITHMS[name]()
    client, kinds = algorithm.init_client(task), algorithm.downlink(task)
    published = algorithm.publish(task, algorithm.init_server(task), np.arange(1))
    down = {name: tree.row(one, 0) if isinstance(kinds[name], Own) else one for name, one in published.items()}
    for name, kind in kinds.items():
        if isinstance(kind, Own) and kind.of:  # of nobody
            down[name] = tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), kind.like) | down[name]
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
