"""Clients kept out of training: they change nothing, and are tested as newcomers, apart from the others."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

import quick_run
from every_algorithm import every_algorithm
from newcomer import registered
from pflmpi import tree
from pflmpi.algorithms import ALGORITHMS
from pflmpi.analysis.run import open_run
from pflmpi.config import load as configuration
from pflmpi.data.federation import save
from pflmpi.errors import ConfigError, DataError
from pflmpi.experiment.build import Experiment, prepare, setup
from pflmpi.forecast.measuring import CohortCost, Cost, Costs
from pflmpi.messages.groups import clients_of
from pflmpi.runtime.client_state import tree_from_arrays
from pflmpi.store import metrics_file, run_folder
from planned_run import planned

UNSEEN = {"partition": {"clients": 9}, "evaluation": {"unseen": 0.2}}
CASES = every_algorithm()


def prepared(raw: dict[str, Any]) -> Experiment:
    return prepare(configuration.parse(raw), torch.device("cpu"))


def test_unseen_clients_never_influence_training(tmp_path):
    raw = quick_run.settings(CASES["fedamp"], **UNSEEN)
    trained = prepared(raw).division.trained
    save(trained, tmp_path / "only.npz")
    only = {**raw, "partition": {"path": str(tmp_path / "only.npz")}, "evaluation": {}}
    assert quick_run.run(raw, tmp_path / "a") == quick_run.run(only, tmp_path / "b")
    kept, alone = (metrics_file.read(tmp_path / name)[-1] for name in "ab")
    names = ("accuracy_mean", "accuracy_weighted", "accuracy_std", "up_bytes", "down_bytes")
    assert [kept[name] for name in names] == [alone[name] for name in names], "unseen clients count among the others"
    assert alone["unseen_accuracy_mean"] == "" and float(kept["unseen_accuracy_mean"]) > 0


def test_samples_are_standardised_by_those_of_trained_clients():
    made = prepared(quick_run.settings(data={"name": "digits", "limit": 400, "normalize": "standard"}, **UNSEEN))
    trained, dataset = made.division.trained, made.division.trained.dataset
    pixels = dataset.images[np.concatenate([*trained.train, *trained.test])] / 255
    assert (
        made.tasks[0].mean[0] == pytest.approx(pixels.mean(), abs=1e-12) != pytest.approx(dataset.images.mean() / 255)
    )


def test_the_seed_chooses_the_unseen_clients_and_the_run_records_them(tmp_path):
    quick_run.run(quick_run.settings(**UNSEEN), tmp_path)
    run = open_run(tmp_path)
    unseen = run.config["recorded"]["unseen"]
    assert len(unseen) == 2 and unseen == sorted(unseen)
    assert unseen == prepared(quick_run.settings(**UNSEEN)).division.unseen_numbers
    assert {tuple(prepared(quick_run.settings(**UNSEEN, seed=seed)).division.unseen_numbers) for seed in range(4)} > {
        tuple(unseen)
    }
    metrics = run.round(3).metrics
    federation = prepared(quick_run.settings(partition={"clients": 9})).federation
    assert metrics["unseen_total"].tolist() == federation.num_test[unseen].tolist()
    assert len(metrics["accuracy"]) == 7 and metrics["participants"].max() < 7


def test_a_newcomer_of_fedavg_predicts_with_the_global_model(tmp_path):
    raw = quick_run.settings(algorithm={"name": "fedavg"}, **UNSEEN)
    quick_run.run(raw, tmp_path)
    experiment = prepared(raw)
    task, everyone = experiment.tasks[0], experiment.division.everyone
    model = tree.part(tree_from_arrays(run_folder.read_server(tmp_path, 3)), "model")
    for client, correct in zip((7, 8), run_folder.read_metrics(tmp_path, 3)["unseen_correct"], strict=True):
        samples = everyone.test[client]
        scores = task.predict(model, task.prepare(torch.from_numpy(everyone.dataset.images[samples])))
        assert int((scores.argmax(1).numpy() == everyone.dataset.labels[samples]).sum()) == correct


def test_a_newcomer_of_fedper_trains_a_new_head_on_the_shared_body(tmp_path):
    raw = quick_run.settings(algorithm={"name": "fedper"}, runtime={"executor": "loop"}, **UNSEEN)
    quick_run.run(raw, tmp_path)
    experiment = prepared(raw)
    unseen = setup(experiment, 1, 1).unseen
    assert unseen is not None
    task, dataset = experiment.tasks[0], experiment.federation.dataset
    body = tree.part(tree_from_arrays(run_folder.read_server(tmp_path, 3)), "shared")
    for client, correct in zip((7, 8), run_folder.read_metrics(tmp_path, 3)["unseen_correct"], strict=True):
        head, lr = tree.part(task.of_client(client).init(), "head"), task.training.learning_rate(4)
        for samples in unseen.executor.order(client, 4, "train", unseen.algorithm.passes(task, 4)["train"], {}):
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in head.items()}
            x, y = (torch.from_numpy(array[samples]) for array in (dataset.images, dataset.labels))
            z = task.features(body, task.prepare(x)).detach()
            loss = torch.nn.functional.cross_entropy(task.logits(leaves, z), y)
            slopes = torch.autograd.grad(loss, list(leaves.values()))
            head = {name: (leaf - lr * g).detach() for (name, leaf), g in zip(leaves.items(), slopes, strict=True)}
        tests = experiment.division.everyone.test[client]
        scores = task.logits(head, task.features(body, task.prepare(torch.from_numpy(dataset.images[tests]))))
        assert int((scores.argmax(1).numpy() == dataset.labels[tests]).sum()) == correct


def test_more_updates_are_a_longer_training(tmp_path):
    accuracy = []
    for updates in (1, 15):
        raw = quick_run.settings(
            algorithm={"name": "local"}, **{**UNSEEN, "evaluation": {"unseen": 0.3, "unseen_updates": updates}}
        )
        quick_run.run(raw, tmp_path / str(updates))
        accuracy.append(run_folder.read_metrics(tmp_path / str(updates), 3)["unseen_accuracy_mean"])
    assert accuracy[1] > accuracy[0] + 0.1


def test_newcomers_that_would_train_at_rate_zero_are_refused_before_the_start(tmp_path):
    falling: dict[str, Any] = {"schedule": "cosine"}
    raw = quick_run.settings(algorithm={"name": "fedper"}, training=falling, **UNSEEN)
    with pytest.raises(ConfigError, match=r"unseen = 0.2: .* round 4, which .* = cosine makes 0; .*decay_floor"):
        quick_run.run(raw, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    two = {"evaluation": {"unseen": 0.2, "unseen_updates": 2}}
    with pytest.raises(ConfigError, match="after round 3 unseen clients train at the learning rate of round 5"):
        prepared(quick_run.settings(raw, training={"decay_rounds": 4}, **two))
    for change in ({"decay_floor": 0.1}, {"decay_rounds": 4}, {"decay_by": "participations"}, {"schedule": "constant"}):
        prepared(quick_run.settings(raw, training=change))
    prepared(quick_run.settings(raw, algorithm={"name": "fedavg"}))  # its newcomers do not train


def test_an_algorithm_without_a_rule_says_so_once_and_the_scores_are_left_out(tmp_path, monkeypatch, caplog):
    raw = quick_run.settings(algorithm=registered(monkeypatch), **UNSEEN)  # with an `Own` message, and no newcomer's
    quick_run.run(raw, tmp_path, ranks=3)
    warnings = [record.getMessage() for record in caplog.records if "unseen" in record.getMessage()]
    assert len(warnings) == 1 and "offset" in warnings[0] and "publish_to_newcomers" in warnings[0]
    assert all(line["unseen_accuracy_mean"] == "" for line in metrics_file.read(tmp_path))
    assert "unseen_correct" not in run_folder.read_metrics(tmp_path, 3)


def test_somebody_is_left_to_train():
    raw = quick_run.settings(partition={"name": "iid", "clients": 2}, evaluation={"unseen": 0.9})
    with pytest.raises(DataError, match="keeps 2 of 2 clients out of training, and nobody is left"):
        prepared(raw)


@pytest.mark.parametrize("case", ["fedavg", "fedamp", "fedgmh-full", "fedfcd-full"])
def test_the_schedule_knows_the_calls_of_newcomers(case):
    run = planned(quick_run.settings(CASES[case], **UNSEEN), 3)
    assert (unseen := run.setup.unseen) is not None
    assert bool(unseen.calls) == (case != "fedavg"), "what is the same for all comes with the reply"
    tested = [now for now in run.schedule() if now.evaluates]
    assert all(len(clients_of([*chain(*now.reporting)])) == len(now.tested) + 2 for now in tested)


def test_a_plan_counts_the_updates_and_the_test_of_newcomers():
    evaluation = {"unseen": 0.2, "unseen_updates": 3}
    ready = setup(prepared(quick_run.settings(algorithm={"name": "local"}, evaluation=evaluation)), 2, 2)
    assert ready.unseen is not None
    (group,) = chain(*ready.unseen.groups)
    tests = int(ready.unseen.executor.federation.num_test[group].max())
    costs = Costs(ready, {0: CohortCost(len(group), Cost(1, 0, 0), 0.0, Cost(10, 0, 0), tests)})
    assert costs.unseen(group) == 3 * 1 + 10


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_states_its_rule(name):
    assert "Newcomers:" in (ALGORITHMS[name].__doc__ or "")
