"""What clients offer is part of their state: declared as it is, also for newcomers, and of runs with such a state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quick_run
from pflmpi import tree
from pflmpi.algorithms.fedfomo import FedFomo
from pflmpi.algorithms.local_only import Local
from pflmpi.config import load as configuration
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.experiment.build import prepare
from pflmpi.experiment.evaluation import count_trained, count_unseen
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Chosen, Offered, Rows, tensor
from pflmpi.runtime.contract import check_declarations
from pflmpi.store import run_folder
from pflmpi.tree import Tree

RAW = quick_run.settings(
    algorithm={"name": "fedfomo", "received_models": 3}, training={"rounds": 4, "lr": 0.5}, checkpoint={"keep": 0}
)


class Mine(Local):
    """Declares what the tests say; its state has a part `model`."""


def chosen(rows: Tree, count: int = 2) -> Chosen:
    return Chosen({"clients": tensor(count, dtype=torch.int64), "model": rows}, of="model")


HEAD: Tree = {"head": {"bias": tensor(10)}}
ROWS: Tree = {"head": {"bias": tensor(2, 10)}}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "not in the state": ({"model": Offered({"tail": tensor(3)})}, {}, ["'model' is `Offered`", "no model/tail", "[3]"]),
    "of another shape": ({"model": Offered({"head": {"bias": tensor(9)}})}, {}, ["no model/head/bias", "[9]"]),
    "of another type": ({"model": Offered({"head": {"bias": tensor(10, dtype=torch.int32)}})}, {}, ["type int32"]),
    "of what is not offered": (
        {"model": Rows(HEAD)},
        {"others": chosen(ROWS)},
        ["'others'", "'model'", "no `Offered`", "known: none"],
    ),
    "other rows": ({"model": Offered(HEAD)}, {"others": chosen(ROWS, 3)}, ["M clients", "[2, 10]", "[3, 10]"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_declarations_that_do_not_fit_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    up, down, words = REFUSED[name]
    monkeypatch.setattr(Mine, "uplink", lambda self, task: up)
    monkeypatch.setattr(Mine, "downlink", lambda self, task: down)
    task = prepare(configuration.parse(RAW), torch.device("cpu")).tasks[0]
    with pytest.raises(ConfigError) as caught:
        check_declarations(Mine(), task)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_a_client_predicts_with_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedFomo, "predicts_with", ("candidates",))
    with pytest.raises(ConfigError, match="predicts_with names 'candidates', a `Chosen` message"):
        prepare(configuration.parse(RAW), torch.device("cpu"))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_trains_unseen_clients_and_tests_from_its_checkpoint_with_what_clients_offer(
    ranks: int, tmp_path: Path
) -> None:
    raw = {**RAW, "partition": {**RAW["partition"], "clients": 9}, "evaluation": {"unseen": 0.2, "when": "both"}}
    quick_run.run(raw, tmp_path, ranks)
    experiment = prepare(configuration.parse(raw), torch.device("cpu"))
    metrics = run_folder.read_metrics(tmp_path, 4)
    assert np.array_equal(count_unseen(experiment, tmp_path, 4).correct, metrics["unseen_correct"])
    # The participants of round 4, from what clients offered after round 3.
    found = count_trained(experiment, tmp_path, 3, lambda *_: None, after_training=True)
    assert np.array_equal(found.correct[metrics["participants"]], metrics["trained_correct"])


def test_a_run_whose_server_kept_something_else_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FedFomo's server kept the models."""
    init, update = FedFomo.init_server, FedFomo.server_update

    def more(self: Any, task: Task) -> Tree:
        return {**init(self, task), "models": tree.map(lambda leaf: leaf.expand(7, *leaf.shape), task.init())}

    with monkeypatch.context() as before:
        before.setattr(FedFomo, "init_server", more)
        before.setattr(
            FedFomo, "server_update", lambda self, task, server, *rest: server | update(self, task, server, *rest)
        )
        quick_run.run(RAW, tmp_path)
    with pytest.raises(
        CheckpointError, match="its server keeps other arrays than those of this pflmpi, such as models/"
    ):
        quick_run.resume(tmp_path, ("training.rounds=5",))
