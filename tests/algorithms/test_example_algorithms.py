"""The algorithms of `examples/` keep what every algorithm must keep, and do what they say."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import comparisons
import quick_run
import small_task
from pflmpi import outside, tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.fedper import FedPer
from pflmpi.errors import ConfigError
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.testing import AlgorithmTests, conformance
from pflmpi.tree import Tree
from project import ROOT


class TestTrimmedMean(AlgorithmTests):
    algorithm: ClassVar[str] = "../../examples/trimmed_mean.py:TrimmedMean"
    options: ClassVar[dict[str, Any]] = {"trimmed": 0}  # few clients take part in these runs


class TestClipped(AlgorithmTests):
    algorithm: ClassVar[str] = "../../examples/clipped.py:Clipped"
    options: ClassVar[dict[str, Any]] = {"largest_change": 0.05}


def test_the_trimmed_mean_leaves_out_the_extremes_of_each_entry():
    algorithm = outside.load(f"{ROOT}/examples/trimmed_mean.py:TrimmedMean")(trimmed=1)
    task, models = small_task.task(), [comparisons.model(seed) for seed in range(5)]
    trimmed_mean = algorithm.server_update(task, {}, {"model": tree.stack(models)}, Round(1, np.arange(5), 0))["model"]
    for path, leaf in tree.leaves(trimmed_mean):
        rows = np.sort(np.stack([tree.at(model, path).double().numpy() for model in models]), 0)
        np.testing.assert_allclose(leaf, rows[1:4].mean(0), rtol=0, atol=1e-6)


def test_a_trimmed_mean_of_nobody_is_refused(tmp_path):
    algorithm = {"name": f"{ROOT}/examples/trimmed_mean.py:TrimmedMean", "trimmed": 9}
    with pytest.raises(ConfigError, match=r"algorithm.trimmed = 9 leaves nothing of . participants; lower it"):
        quick_run.run(quick_run.settings(algorithm=algorithm), tmp_path / "run")


@pytest.mark.parametrize("largest", [0.01, 100.0])
def test_a_clipped_change_has_at_most_that_norm(largest):
    algorithm = outside.load(f"{ROOT}/examples/clipped.py:Clipped")(largest_change=largest)
    task, received = small_task.task(), comparisons.model(1)
    client, down = {"head": received["head"]}, {"body": {"body": received["body"]}}
    data = small_task.data([small_task.batch(0)])
    _, up = algorithm.client_update(task, client, down, data)
    _, plain = FedPer().client_update(task, client, down, data)

    def change(sent):
        leaves = [tree.at(sent["body"], path) - leaf for path, leaf in tree.leaves(down["body"])]
        return torch.cat([leaf.flatten() for leaf in leaves])

    scale = min(1, largest / change(plain).norm())
    torch.testing.assert_close(change(up), change(plain) * scale, rtol=1e-4, atol=1e-7)


class Unseeded(FedAvg):
    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        bias = tree.at(up["model"], "head/bias") + (np.random.default_rng().normal() if round.number > 1 else 0)
        return {"model": {**up["model"], "head": {**tree.part(up["model"], "head"), "bias": bias.float()}}}


def test_what_a_continuation_changes_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(ALGORITHMS._objects, "unseeded", Unseeded)
    runs = conformance.Runs({"algorithm": {"name": "unseeded"}, "training": {"participation": 1.0}}, tmp_path)
    with pytest.raises(AssertionError, match="other bits after a continuation: server/model/body/fc1/bias, "):
        conformance.exact_continuation(runs, "latest")
