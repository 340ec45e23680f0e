"""What a run records: losses, F1 and the lowest tenth, seconds of its ranks, how its samples are normalised."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

import quick_run
from described import about
from pflmpi.analysis.run import open_run
from pflmpi.config import load as configuration
from pflmpi.data import dataset, loading, unseen
from pflmpi.experiment.build import prepare
from pflmpi.messages.groups import ClientGroup
from pflmpi.runtime import round_report
from pflmpi.runtime.counts import Counts, compute_metrics
from pflmpi.store import metrics_file, run_folder
from pflmpi.testing.conformance import EXECUTORS
from thread_transport import run_ranks


@pytest.mark.parametrize("executor", EXECUTORS)
def test_losses_and_measures_are_recorded_and_the_same_on_three_ranks(executor, tmp_path):
    raw = quick_run.settings(
        algorithm={"name": "fedper"}, training={"rounds": 2}, runtime={"executor": executor, "lanes": 2}
    )
    for ranks in (1, 3):
        quick_run.run(raw, tmp_path / str(ranks), ranks)
    one, three = (run_folder.read_metrics(tmp_path / str(ranks), 2) for ranks in (1, 3))
    for name in one:
        if not name.startswith("seconds"):
            np.testing.assert_array_equal(one[name], three[name], err_msg=name)
    assert len(one["client_train_loss"]) == len(one["participants"]) and (one["client_train_loss"] > 0).all()
    assert (one["hits"].sum(1) == one["correct"]).all() and (one["predicted"].sum(1) == one["total"]).all()
    line = metrics_file.read(tmp_path / "1")[1]
    for name, value in (
        ("train_loss", one["client_train_loss"].mean()),
        ("test_loss", one["client_test_loss"].mean()),
        ("f1_macro", one["client_f1"].mean()),
        ("accuracy_bottom", one["accuracy"].min()),  # of seven clients
    ):
        assert float(line[name]) == pytest.approx(value, abs=1e-6), name


def test_the_training_loss_is_that_of_the_steps_before_they_are_taken(tmp_path):
    """With one step over all samples it is the loss of the initial model on them."""
    raw: dict[str, Any] = quick_run.settings(
        algorithm={"name": "fedavg"}, training={"rounds": 1, "batch_size": 1000, "participation": 1.0}
    )
    quick_run.run(raw, tmp_path / "run")
    experiment = prepare(configuration.parse(raw), torch.device("cpu"))
    task, data = experiment.tasks[0], experiment.federation
    losses = run_folder.read_metrics(tmp_path / "run", 1)["client_train_loss"]
    for client, rows in enumerate(data.train):
        images, labels = (torch.from_numpy(np.array(all[rows])) for all in (data.dataset.images, data.dataset.labels))
        scores = task.predict(task.init(), task.prepare(images))
        expected = torch.nn.functional.cross_entropy(scores, labels).item()
        assert losses[client] == pytest.approx(expected, abs=1e-5)


def counted(labels, predictions, classes):
    def of(chosen):
        return np.stack([np.bincount(client_labels, minlength=classes) for client_labels in chosen])

    hits = of([y[y == p] for y, p in zip(labels, predictions, strict=True)])
    return Counts(hits, of(predictions), of(labels), np.arange(len(labels), dtype=np.float64))


def test_macro_f1_is_that_of_scikit_learn_for_each_client():
    rng = np.random.default_rng(0)
    labels = [rng.integers(0, 3, size) for size in (1, 7, 40)]  # classes 3 and 4: never there, sometimes predicted
    predictions = [rng.integers(0, 4, len(client_labels)) for client_labels in labels]
    expected = [f1_score(y, p, average="macro") for y, p in zip(labels, predictions, strict=True)]
    counts = counted(labels, predictions, 5)
    np.testing.assert_allclose(counts.macro_f1, expected, rtol=1e-12)
    assert np.isclose(compute_metrics(counts)["f1_macro"], np.mean(expected))


def test_figures_leave_out_clients_without_samples():
    hits = np.array([[1, 0], [2, 2], [0, 0], [0, 1]])
    counts = Counts(hits, hits, np.array([[2, 0], [2, 2], [0, 0], [3, 1]]), np.array([1.0, 2.0, 0.0, 6.0]))
    metrics = compute_metrics(counts)
    assert metrics["accuracy_mean"] == np.mean([0.5, 1, 0.25]) and metrics["accuracy_weighted"] == 6 / 10
    assert metrics["accuracy_bottom"] == 0.25 and metrics["accuracy_std"] == np.std([0.5, 1, 0.25])
    assert metrics["test_loss"] == np.mean([0.5, 0.5, 1.5]) and np.isnan(counts.accuracy[2])
    assert counts.class_accuracy.tolist() == [3 / 7, 1.0]


def test_the_bottom_tenth_is_the_mean_of_the_lowest_clients():
    total = np.full((30, 1), 100)
    hits = np.random.default_rng(0).permutation(30).reshape(30, 1)
    assert np.isclose(compute_metrics(Counts(hits, hits, total, np.zeros(30)))["accuracy_bottom"], 0.01)


SECONDS = [(0.0, 0.0), (3.0, 1.0), (1.0, 1.0)]  # of training and of testing
GROUPS: list[list[ClientGroup]] = [[], [np.array([0])], [np.array([1])]]  # rank 0 serves and does not compute


def test_waiting_and_testing_are_means_of_the_ranks_that_compute():
    totals = np.full((2, 2), 3, np.int64)
    setup = SimpleNamespace(task=SimpleNamespace(num_clients=2), validation=None)
    now: Any = SimpleNamespace(reporting=GROUPS, training=GROUPS, test_class_counts=totals, setup=setup)

    def work(transport):
        rank_groups = GROUPS[transport.rank]
        tested = Counts.none(totals[: len(rank_groups)])
        losses = {int(group[0]): 0.5 for group in rank_groups}
        stop = float(transport.rank), 1.0
        return round_report.gather_report(transport, now, tested, losses, SECONDS[transport.rank], stop)

    report, *other_reports = run_ranks(3, work)
    assert report is not None and other_reports == [None, None]
    assert report.seconds == {"compute": 4.0, "waiting": 1.0, "evaluation": 1.0}
    assert report.train_loss.tolist() == [0.5, 0.5]
    assert report.stop.tolist() == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert len(report.memory) == 3 and (report.memory > 1 << 20).all(), "Linux says it"


RNG = np.random.default_rng(0)


@pytest.fixture
def table(tmp_path):
    x, who = RNG.normal(5, [1, 2, 30], (200, 3)), np.arange(200) % 5
    np.savez(tmp_path / "my.npz", x=x, y=(x[:, 0] > 5).astype(int), client=who)
    return tmp_path / "my.npz"


def of_another_library(data, samples=None):
    """The figures of a library that adds up differently, much exaggerated."""
    ours = dataset.standardise(data, samples)
    return replace(ours, mean=tuple(value + 0.1 for value in ours.mean), std=tuple(2 * value for value in ours.std))


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_continuation_and_other_data_are_normalised_by_the_recorded_figures(
    share, table, tmp_path, monkeypatch, capsys
):
    raw = quick_run.settings(
        data={"name": "my", "path": str(table), "normalize": "standard", "limit": None},
        partition={"name": "writers", "clients": None},
        evaluation={"unseen": share},
    )
    digest = quick_run.run(raw, tmp_path / "whole")
    np.savez(tmp_path / "new.npz", x=RNG.normal(9, 9, (50, 3)), y=np.arange(50) % 2)
    words = ["evaluate", str(tmp_path / "whole"), "--data", str(tmp_path / "new.npz"), "-o"]
    assert quick_run.command([*words, str(tmp_path / "before.csv")]) == 0
    quick_run.run(quick_run.settings(raw, training={"rounds": 1}), tmp_path / "run")
    for module in (loading, unseen):
        monkeypatch.setattr(module, "standardise", of_another_library)
    assert quick_run.run(raw, tmp_path / "other") != digest, "the figures matter"
    assert quick_run.resume(tmp_path / "run", ("training.rounds=3",), ranks=2) == digest
    capsys.readouterr()
    assert quick_run.command(["evaluate", str(tmp_path / "whole")]) == 0
    assert "the run recorded the same accuracy for every client" in capsys.readouterr().out
    assert quick_run.command([*words, str(tmp_path / "after.csv")]) == 0
    assert (tmp_path / "after.csv").read_text() == (tmp_path / "before.csv").read_text()


def test_they_are_in_every_checkpoint_and_shown(table, tmp_path, capsys):
    data = {"name": "my", "path": str(table), "normalize": "standard", "limit": None}
    quick_run.run(quick_run.settings(data=data, partition={"name": "writers", "clients": None}), tmp_path / "run")
    x = np.load(table)["x"].astype(np.float32)
    for number in open_run(tmp_path / "run").rounds:
        with h5py.File(tmp_path / "run" / f"round_{number:05}.h5") as file:
            recorded = about(file)["normalisation"]
            np.testing.assert_allclose(recorded["mean"], x.mean(0, np.float64), rtol=1e-12)
            np.testing.assert_allclose(recorded["std"], x.std(0, dtype=np.float64), rtol=1e-12)
    normalisation = open_run(tmp_path / "run").round().normalisation
    shown = " ".join(f"{value:.4g}" for value in normalisation["mean"])
    assert quick_run.command(["inspect", str(tmp_path / "run")]) == 0
    assert f"samples are normalised: mean {shown}, deviation" in capsys.readouterr().out
    assert quick_run.command(["data", str(table)]) == 0
    assert f"standard mean {shown}, deviation" in capsys.readouterr().out


def test_bytes_are_normalised_as_the_checkpoint_says(tmp_path):
    quick_run.run(quick_run.settings(), tmp_path)
    normalisation = open_run(tmp_path).round().normalisation
    assert (normalisation["mean"].tolist(), normalisation["std"].tolist()) == ([0.5], [0.5])
