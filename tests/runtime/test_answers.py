"""Messages that clients keep: answers until they next take part, and rows of their state for other clients."""

from typing import Any

import numpy as np
import pytest
import torch

import quick_run
from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedamp import FedAMP
from pflmpi.algorithms.fedfomo import FedFomo
from pflmpi.algorithms.local_only import Local
from pflmpi.config import load as configuration
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.experiment import run as experiment_run
from pflmpi.experiment.build import prepare
from pflmpi.experiment.evaluation import count_trained, count_unseen
from pflmpi.machine import Space
from pflmpi.messages.kinds import Messages, Own, Rows, tensor, with_rows
from pflmpi.runtime.client_state import tree_from_arrays
from pflmpi.runtime.contract import check_declarations
from pflmpi.store import run_folder

AMP = {"name": "fedamp", "alpha": 0.5, "sigma": 2.0}
FOMO = {"name": "fedfomo", "received_models": 3}
RAW = quick_run.settings(algorithm=AMP, training={"rounds": 4}, checkpoint={"keep": 0})
FOMO_RAW = quick_run.settings(RAW, algorithm=FOMO, training={"lr": 0.5})
UNSEEN = {"evaluation": {"unseen": 0.2}}


def states(folder, round):
    (_, arrays) = run_folder.read_clients(folder, round, np.arange(7))["cohort0"]
    return tree_from_arrays(arrays)


def test_participants_have_the_mean_of_equation_4_and_the_absent_keep_theirs(tmp_path):
    """With whole models in one place, the oracle of the rule; bit by bit."""
    quick_run.run(RAW, tmp_path, ranks=3)
    before = tree.part(tree.part(states(tmp_path, 0), "answered"), "cloud")
    assert all(torch.equal(leaf, tree.at(states(tmp_path, 0), f"model/{path}")) for path, leaf in tree.leaves(before))
    for round in range(1, 5):
        now = states(tmp_path, round)
        models, cloud = tree.part(now, "model"), tree.part(tree.part(now, "answered"), "cloud")
        chosen = torch.from_numpy(run_folder.read_metrics(tmp_path, round)["participants"])
        flat = [tree.flat_rows(tree.at(models, path)[chosen]).double() for path, _ in tree.leaves(cloud)]
        gram = torch.stack([(rows - rows[:1]) @ (rows - rows[:1]).mT for rows in flat]).sum(0)
        norms = gram.diagonal()
        xi = 0.5 * torch.exp(-(norms.unsqueeze(1) + norms - 2 * gram).clamp(min=0) / 2.0) / 2.0
        xi = xi - torch.diag(xi.diagonal())
        xi = xi / xi.sum(1, keepdim=True).clamp(min=1)
        xi = xi + torch.diag(1 - xi.sum(1))
        for (path, actual), rows, old in zip(tree.leaves(cloud), flat, dict(tree.leaves(before)).values(), strict=True):
            expected = old.clone()
            expected[chosen] = (xi @ rows).float().view(len(chosen), *actual.shape[1:])
            assert torch.equal(actual, expected), (round, path)
        before = cloud


class Wrong(Local):
    """Declares what the tests say; its state has a part `model`."""


HEAD: tree.Tree = {"head": {"bias": tensor(10)}}


def of_model(rows, count=2):
    return Own({"clients": tensor(count, dtype=torch.int64), "model": rows}, of="model")


def kept(like):
    return {"model": Rows(like, kept=True)}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "first ones of other names": ({}, {"reply": Own(HEAD, kept=True)}, ["init_received", "reply/head/bias"]),
    "not in the state": (kept({"tail": tensor(3)}), {}, ["'model' is kept", "no model/tail", "[3]"]),
    "of another shape": (kept({"head": {"bias": tensor(9)}}), {}, ["no model/head/bias", "[9]"]),
    "of another type": (kept({"head": {"bias": tensor(10, dtype=torch.int32)}}), {}, ["type int32"]),
    "of what is not kept": (
        {"model": Rows(HEAD)},
        {"others": of_model(with_rows(HEAD, 2))},
        ["'others'", "'model'", "no kept `Rows`", "known: none"],
    ),
    "other rows": (kept(HEAD), {"others": of_model(with_rows(HEAD, 2), 3)}, ["M clients", "[2, 10]", "[3, 10]"]),
    "both kept and of rows": (kept(HEAD), {"others": Own(HEAD, kept=True, of="model")}, ["'others'", "one of both"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_declarations_that_do_not_fit_each_other_are_refused(name, monkeypatch):
    up, down, words = REFUSED[name]
    monkeypatch.setattr(Wrong, "uplink", lambda self, task: up)
    monkeypatch.setattr(Wrong, "downlink", lambda self, task: down)
    task = prepare(configuration.parse(RAW), torch.device("cpu")).tasks[0]
    with pytest.raises(ConfigError) as caught:
        check_declarations(Wrong(), task)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("kind, name", [(FedAMP, "cloud"), (FedFomo, "candidates")])
def test_what_a_client_predicts_with_is_not_for_training_alone(kind, name, monkeypatch):
    monkeypatch.setattr(kind, "predicts_with", (name,))
    raw = RAW if kind is FedAMP else {**RAW, "algorithm": FOMO}
    with pytest.raises(ConfigError, match=f"predicts_with names '{name}', which is for local training alone"):
        prepare(configuration.parse(raw), torch.device("cpu"))


@pytest.mark.parametrize(
    "algorithm, message", [({"name": "fesem"}, "FeSEM's message '(model|centre)'"), (AMP, "FedAMP's message")]
)
def test_a_run_whose_rows_rank_0_cannot_hold_is_refused_at_the_start(algorithm, message, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment_run, "memory", lambda: Space(1 << 30, 1000))
    with pytest.raises(ConfigError, match=f"rank 0 needs .* of memory for rows of .*{message}.* 1000 B are free"):
        quick_run.run({**RAW, "algorithm": algorithm}, tmp_path / "rows")
    quick_run.run({**RAW, "algorithm": {"name": "fedavg"}}, tmp_path / "mean")


def test_one_participant_is_answered_with_its_own_model():
    up: Messages = {"model": {"w": torch.tensor([[5.0, 7.0]])}}
    answer = FedAMP().answer(None, {}, up, Round(1, np.array([3]), 0))
    assert torch.equal(tree.at({**answer}, "cloud/w"), tree.at({**up}, "model/w"))


def test_a_run_without_the_answers_is_not_tested_with_zeros(tmp_path, monkeypatch):
    """As FedAMP's were before the clients kept them."""
    raw = {**RAW, "algorithm": {"name": "local"}, "partition": {**RAW["partition"], "clients": 9}, **UNSEEN}
    quick_run.run(raw, tmp_path)
    experiment = prepare(configuration.parse({**raw, "algorithm": AMP}), torch.device("cpu"))
    for test in (
        lambda: count_unseen(experiment, tmp_path, 4),
        lambda: count_trained(experiment, tmp_path, 4, lambda *_: None, after_training=True),
    ):
        with pytest.raises(CheckpointError, match="earlier pflmpi, whose clients keep other arrays, such as answered/"):
            test()


def test_a_run_trains_unseen_clients_and_tests_from_its_checkpoint_with_what_clients_keep(tmp_path):
    raw = {**FOMO_RAW, "partition": {**RAW["partition"], "clients": 9}, "evaluation": {"unseen": 0.2, "when": "both"}}
    quick_run.run(raw, tmp_path, 3)
    experiment = prepare(configuration.parse(raw), torch.device("cpu"))
    metrics = run_folder.read_metrics(tmp_path, 4)
    assert np.array_equal(count_unseen(experiment, tmp_path, 4).correct, metrics["unseen_correct"])
    # The participants of round 4, from what clients kept after round 3.
    counts = count_trained(experiment, tmp_path, 3, lambda *_: None, after_training=True)
    assert np.array_equal(counts.correct[metrics["participants"]], metrics["trained_correct"])


def test_a_run_whose_server_kept_something_else_is_not_continued(tmp_path, monkeypatch):
    """As FedFomo's server kept the models."""
    init, update = FedFomo.init_server, FedFomo.server_update

    def more(self, task):
        return {**init(self, task), "models": tree.map(lambda leaf: leaf.expand(7, *leaf.shape), task.init())}

    with monkeypatch.context() as before:
        before.setattr(FedFomo, "init_server", more)
        before.setattr(
            FedFomo, "server_update", lambda self, task, server, *rest: server | update(self, task, server, *rest)
        )
        quick_run.run(FOMO_RAW, tmp_path)
    with pytest.raises(
        CheckpointError, match="its server keeps other arrays than those of this pflmpi, such as models/"
    ):
        quick_run.resume(tmp_path, ("training.rounds=5",))
