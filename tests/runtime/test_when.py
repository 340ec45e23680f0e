"""`evaluation.when: both`: the participants are tested with the models that local training leaves, too."""

from typing import Any

import numpy as np
import pytest

import quick_run
from every_algorithm import TESTED
from pflmpi.analysis.run import open_run
from pflmpi.store import metrics_file

BOTH = {"when": "both"}


def settings(**sections):
    return quick_run.settings(sections, evaluation={**BOTH, **sections.pop("evaluation", {})})


def trained(run):
    last = open_run(run).round()
    return [last.metrics[f"trained_{name}"] for name in ("hits", "predicted", "client_test_loss")]


@pytest.mark.parametrize("name", [*TESTED, "l2gd"])
def test_the_bits_of_the_run_stay_and_every_rank_counts_the_same(name, tmp_path):
    share = 1.0 if name == "l2gd" else 0.5
    sections: dict[str, Any] = {"algorithm": {"name": name}, "training": {"rounds": 2, "participation": share}}
    plain = quick_run.run(quick_run.settings(sections), tmp_path / "plain")
    assert quick_run.run(settings(**sections), tmp_path / "both") == plain
    assert quick_run.run(settings(**sections), tmp_path / "three", ranks=3) == plain
    for one, other in zip(trained(tmp_path / "both"), trained(tmp_path / "three"), strict=True):
        np.testing.assert_array_equal(one, other)
    before, after = (open_run(tmp_path / run).round().metrics for run in ("plain", "both"))
    np.testing.assert_array_equal(before["hits"], after["hits"])
    assert len(after["trained_accuracy"]) == len(after["participants"])


def test_a_client_alone_has_after_training_what_it_receives(tmp_path):
    """The mean of one model is that model."""
    one = settings(
        algorithm={"name": "fedavg"}, partition={"name": "iid", "clients": 1}, training={"participation": 1.0}
    )
    quick_run.run(one, tmp_path / "run")
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
    both = settings(algorithm={"name": "fedavg"}, evaluation={"unseen": 0.3})
    digest = quick_run.run(both, tmp_path / "run")
    assert quick_run.run(both, tmp_path / "two", ranks=2) == digest
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
