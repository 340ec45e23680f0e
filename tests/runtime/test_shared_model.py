"""Clients with one model are tested together; the bits of a client do not depend on the samples beside its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import quick_run
from pflmpi import tree
from pflmpi.config import load as configuration
from pflmpi.experiment.build import prepare, setup
from pflmpi.learning.task import HOST
from pflmpi.runtime import evaluation

FEDAVG = {"algorithm": {"name": "fedavg"}}


def setup_of(base, **sections):
    return setup(prepare(configuration.parse(quick_run.settings(base, **sections)), HOST), 1, 1)


@pytest.fixture
def asked(monkeypatch):
    """The clients of each call, as they are tested."""
    called: list[list[int]] = []
    evaluate = evaluation.evaluate_together
    monkeypatch.setattr(evaluation, "evaluate_together", lambda *a: called.append(a[1].tolist()) or evaluate(*a))
    return called


@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn", "resnet18"])
def test_a_client_gets_the_same_whoever_is_tested_with_it(model):
    torch.set_num_threads(1)
    size = {"kernel": 3, "padding": 1} if model == "cnn" else {}
    ready = setup_of(FEDAVG, model={"name": model, **size}, partition={"name": "dirichlet", "clients": 7, "beta": 0.5})
    executor, down = ready.executor, {"model": ready.task.init()}
    groups = [np.array(one) for one in ([2], [0, 2], [2, 5, 6], list(range(7)))]
    first, *others = [evaluation.evaluate_together(executor, group, down, 1)().rows(group == 2) for group in groups]
    for other in others:
        assert other.loss.tobytes() == first.loss.tobytes() and other.hits.tolist() == first.hits.tolist()
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
    assert [one.tolist() for one in evaluation.regrouped(executor, groups)] == [[1, 2, 5], [0, 3, 4]]
    monkeypatch.setattr(evaluation, "_MOST", int(executor.federation.num_test.max()))
    cut = [one.tolist() for one in evaluation.regrouped(executor, groups)]
    assert [client for one in cut for client in one] == [1, 2, 5, 0, 3, 4] and len(cut) > 2
    assert list(evaluation.regrouped(executor, [])) == []
