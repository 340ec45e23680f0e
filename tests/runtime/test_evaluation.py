"""Who is tested together and when: clients with one model at once, participants also before the server's answer."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import quick_run
from every_algorithm import TESTED
from pflmpi import tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.fedper import FedPer
from pflmpi.analysis.run import open_run
from pflmpi.learning.client import ClientData
from pflmpi.learning.early_stop import EarlyStop, EarlyStopConfig
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.runtime import evaluation
from pflmpi.store import metrics_file, run_folder
from pflmpi.tree import Tree
from planned_run import planned

FEDAVG = {"algorithm": {"name": "fedavg"}}


def setup_of(base, **sections):
    return planned(quick_run.settings(base, **sections), 1).setup


@pytest.fixture
def asked(monkeypatch):
    """The clients of each call, as they are tested."""
    called: list[list[int]] = []
    evaluate = evaluation.evaluate_together
    monkeypatch.setattr(evaluation, "evaluate_together", lambda *a: called.append(a[1].tolist()) or evaluate(*a))
    return called


@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn", "resnet18", "table"])
def test_a_client_gets_the_same_whoever_is_tested_with_it(model, tmp_path):
    torch.set_num_threads(1)
    size = {"kernel": 3, "padding": 1} if model == "cnn" else {}
    partition, data = {"name": "dirichlet", "clients": 7, "beta": 0.5}, {}
    if model == "table":  # rows of 24 bytes, each aligned otherwise than the one before
        rng, model, data = np.random.default_rng(0), "mlp", {"path": str(tmp_path / "my.npz"), "limit": None}
        np.savez(tmp_path / "my.npz", x=rng.normal(size=(401, 6)), y=rng.integers(0, 3, 401))
        size = {"hidden": 8}
    ready = setup_of(FEDAVG, model={"name": model, **size}, partition=partition, data=data)
    executor, down = ready.executor, {"model": ready.task.init()}
    groups = [np.array(clients) for clients in ([2], [0, 2], [2, 5, 6], list(range(7)))]
    first, *later = [evaluation.evaluate_together(executor, group, down, 1)().rows(group == 2) for group in groups]
    for counts in later:
        assert counts.loss.tobytes() == first.loss.tobytes() and counts.hits.tolist() == first.hits.tolist()
    rows = {"model": tree.map(lambda leaf: leaf.unsqueeze(0), down["model"])}
    alone = executor.evaluate(groups[0], {}, rows, 1)()
    assert alone.hits.tolist() == first.hits.tolist() and alone.predicted.tolist() == first.predicted.tolist()
    assert alone.loss == pytest.approx(first.loss, rel=1e-5) and first.samples.sum() > 1


def test_only_clients_with_one_model_are_tested_together():
    assert setup_of(FEDAVG).shares_model
    assert not setup_of({"algorithm": {"name": "fedper"}}).shares_model, "a head of its own"
    assert not setup_of({"algorithm": {"name": "fesem"}}).shares_model, "the model of its group"
    assert not setup_of({"algorithm": {"name": "perfedavg"}}).shares_model, "it adapts"
    late = {"evaluation": {"absent": "last_received"}, "training": {"participation": 0.5}}
    assert not setup_of(FEDAVG, **late).shares_model, "an absent one keeps what it has received"


def test_a_run_tests_them_together(asked, tmp_path):
    quick_run.run(quick_run.settings(FEDAVG, partition={"clients": 5}, training={"rounds": 2}), tmp_path)
    assert asked == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize(("name", "together"), [("fedavg", [[0, 1, 2, 3], [4]]), ("perfedavg", [])])
def test_so_are_unseen_clients(name, together, asked, tmp_path):
    settings = {"partition": {"clients": 5}, "evaluation": {"unseen": 0.2}, "training": {"rounds": 1}}
    quick_run.run(quick_run.settings({"algorithm": {"name": name}}, **settings), tmp_path)
    assert asked == together, "perfedavg adapts the model of each"


def test_cohorts_and_many_samples_are_tested_apart(monkeypatch):
    executor = replace(setup_of(FEDAVG, partition={"clients": 6}).executor, cohort=np.array([1, 0, 0, 1, 1, 0]))
    groups = [np.array([4]), np.array([1, 5]), np.array([0, 2, 3])]
    assert [group.tolist() for group in evaluation.regroup(executor, groups)] == [[1, 2, 5], [0, 3, 4]]
    monkeypatch.setattr(evaluation, "_MAX_SAMPLES", int(executor.federation.num_test.max()))
    cut = [group.tolist() for group in evaluation.regroup(executor, groups)]
    assert [client for group in cut for client in group] == [1, 2, 5, 0, 3, 4] and len(cut) > 2
    assert list(evaluation.regroup(executor, [])) == []


BOTH = {"when": "both"}


def settings(**sections):
    return quick_run.settings(sections, evaluation={**BOTH, **sections.pop("evaluation", {})})


@pytest.mark.parametrize("name", [*TESTED, "l2gd"])
def test_the_bits_of_the_run_stay(name, tmp_path):
    share = 1.0 if name == "l2gd" else 0.5
    sections: dict[str, Any] = {"algorithm": {"name": name}, "training": {"rounds": 2, "participation": share}}
    plain = quick_run.run(quick_run.settings(sections), tmp_path / "plain")
    assert quick_run.run(settings(**sections), tmp_path / "both") == plain
    before, after = (open_run(tmp_path / run).round().metrics for run in ("plain", "both"))
    np.testing.assert_array_equal(before["hits"], after["hits"])
    assert len(after["trained_accuracy"]) == len(after["participants"])


def test_a_client_alone_has_after_training_what_it_receives(tmp_path):
    """The mean of one model is that model."""
    raw = settings(
        algorithm={"name": "fedavg"}, partition={"name": "iid", "clients": 1}, training={"participation": 1.0}
    )
    quick_run.run(raw, tmp_path / "run")
    last = open_run(tmp_path / "run").round().metrics
    np.testing.assert_array_equal(last["trained_hits"], last["hits"])


@pytest.mark.parametrize(("name", "changes"), [("fedavg", True), ("fesem", True), ("ditto", False), ("local", False)])
def test_what_is_tested_is_the_model_before_the_server_answers(name, changes, tmp_path):
    quick_run.run(settings(algorithm={"name": name}, training={"participation": 1.0, "lr": 0.3}), tmp_path / "run")
    last = open_run(tmp_path / "run").round().metrics
    same = np.array_equal(last["trained_client_test_loss"], last["client_test_loss"])
    assert same != changes, "a model of its own is the same before and after the answer"


def test_columns_are_those_of_the_checkpoint(tmp_path):
    quick_run.run(settings(algorithm={"name": "fedavg"}, evaluation={"every": 2}), tmp_path / "run")
    first, second, third = metrics_file.read(tmp_path / "run")
    names = ["trained_accuracy_mean", "trained_accuracy_weighted", "trained_accuracy_std", "trained_test_loss"]
    assert [first[name] for name in names] == [""] * 4
    assert all(second[name] for name in names)
    stored = open_run(tmp_path / "run").round().metrics
    assert [third[name] for name in names] == [f"{float(stored[name]):.6f}" for name in names]
    assert third["trained_accuracy_mean"] != third["accuracy_mean"]


def test_with_unseen_clients_and_failing_ones(tmp_path):
    raw = settings(algorithm={"name": "fedavg"}, evaluation={"unseen": 0.3})
    digest = quick_run.run(raw, tmp_path / "run")
    assert quick_run.run(raw, tmp_path / "two", ranks=2) == digest
    one, two = (metrics_file.read(tmp_path / run)[-1] for run in ("run", "two"))
    for name in ("accuracy_mean", "unseen_accuracy_mean", "trained_accuracy_mean"):
        assert one[name] == two[name] != ""


def test_evaluate_trains_from_a_checkpoint_as_the_next_round_does(tmp_path, capsys):
    run = tmp_path / "run"
    quick_run.run(settings(checkpoint={"keep": 0}), run)
    table = tmp_path / "clients.csv"
    words = ["evaluate", str(run), "--round", "2", "--after-training", "-o", str(table)]
    assert quick_run.command(words) == 0
    assert "after local training" in " ".join(capsys.readouterr().out.split())
    lines = [line.split(",") for line in table.read_text().splitlines()[1:]]
    stored = open_run(run).round(3).metrics
    assert [int(lines[client][2]) for client in stored["participants"]] == stored["trained_correct"].tolist()


class Diverging(FedPer):
    """FedPer in which all scores of client 2 are NaN."""

    def init_client(self, task: Task, client: int) -> Tree:  # type: ignore[override]
        return {**super().init_client(task), "number": torch.tensor(client)}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        own, up = super().client_update(task, {"head": client["head"]}, down, data)
        return {**own, "number": client["number"]}, up

    def predict(self, task: Task, client: Tree, down: Messages, x: torch.Tensor) -> torch.Tensor:
        return super().predict(task, client, down, x).where(tree.leaf(client, "number") != 2, torch.nan)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_a_client_without_scores_counts_as_wrong_and_its_loss_as_infinite(executor, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(ALGORITHMS._objects, "diverging", Diverging)
    monkeypatch.chdir(tmp_path)  # where the report goes
    evaluation = {"measures": ["auroc", "calibration_error"]}
    raw = quick_run.settings(algorithm={"name": "diverging"}, runtime={"executor": executor}, evaluation=evaluation)
    run = tmp_path / "run"
    assert quick_run.run(raw, run) == quick_run.run(raw, tmp_path / "two", 2)
    assert caplog.text.count("round 1: the test loss of client 2 is not finite and counts as infinite") == 2  # runs
    arrays = run_folder.read_metrics(run, 3)
    assert np.flatnonzero(np.isinf(arrays["client_test_loss"])).tolist() == [2]
    assert arrays["accuracy"][2] == arrays["predicted"][2].sum() == 0
    lines = metrics_file.read(run)
    for line in lines:
        assert line["test_loss"] == line["calibration_error_mean"] == "inf" and line["auroc_mean"] == "-inf"
        assert 0 < float(line["accuracy_mean"]) < 1
    stop = EarlyStop(EarlyStopConfig(metric="test_loss", patience=2), [{**lines[0], "test_loss": "2.0"}, *lines[1:]])
    assert stop.why == "test_loss has not improved on 2 of round 1 for 2 rounds"
    for command in (["report", run], ["inspect", run], ["compare", run, tmp_path / "two"]):
        assert quick_run.command([*map(str, command)]) == 0
