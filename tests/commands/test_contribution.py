"""`pflmpi contribution`: leave-one-out accuracy by forks."""

import csv
import shutil

import numpy as np
import pytest

import quick_run
from pflmpi.analysis.run import open_run
from pflmpi.cli import main

ROUNDS = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    quick_run.run(quick_run.settings(training={"rounds": ROUNDS}, checkpoint={"keep": 0}), folder)
    return folder


def contribution(run, out, *words):
    return main(["contribution", str(run), "--out", str(out), "--ranks", "1", *words])


def others(run, client):
    return 100 * np.nanmean(np.delete(open_run(run).round(ROUNDS).metrics["accuracy"], client))


def test_from_round_0_it_is_true_retraining_and_what_is_done_is_not_done_again(whole, tmp_path):
    assert contribution(whole, tmp_path / "out", "--clients", "2,5,2") == 0
    for client in (2, 5):
        raw = quick_run.settings(training={"rounds": ROUNDS, "without_clients": [client]})
        digest = quick_run.run(raw, tmp_path / f"retrained-{client}")
        assert quick_run.digest(tmp_path / f"out/without-{client}") == digest
    with (tmp_path / "out/contribution.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["client"] for line in lines] == ["2", "5"]
    for line in lines:
        values = [float(line[f"others {word} it (%)"]) for word in ("with", "without")]
        runs = (whole, tmp_path / f"retrained-{line['client']}")
        assert values == [round(others(run, int(line["client"])), 2) for run in runs]
        assert float(line["contribution (points)"]) == pytest.approx(
            values[0] - values[1], abs=0.011
        )  # of the roundings
    rounds = sorted((tmp_path / "out").rglob("round_*"))
    times = [path.stat().st_mtime_ns for path in rounds]
    assert contribution(whole, tmp_path / "out", "--clients", "5") == 0
    assert [path.stat().st_mtime_ns for path in rounds] == times


def test_what_cannot_be_compared_is_refused(whole, tmp_path, capfd, monkeypatch):
    def refused(run, *words):
        assert contribution(run, tmp_path / "out", "--clients", "2", *words) == 2
        return capfd.readouterr().err

    open_run(whole).fork(tmp_path / "out/without-2", round=1, without_clients=[3])
    open_run(whole).fork(tmp_path / "longer", training={"rounds": 9})
    assert "longer has not reached its last round" in refused(tmp_path / "longer")
    open_run(whole).fork(tmp_path / "out/without-4", round=0, without_clients=[3])
    assert "without-2 is no fork of" in refused(whole)
    assert "without-4 was made with another configuration: training.without_clients" in refused(whole, "--clients", "4")
    assert "has no checkpoint of round 7" in refused(whole, "--from", "7", "--clients", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert "start it without a launcher" in refused(whole)


def test_a_run_that_stopped_early_is_compared_with_the_same_round_without_the_client(tmp_path):
    training = {"rounds": 9, "schedule": "cosine", "stop": {"metric": "accuracy_mean", "patience": 1}}
    quick_run.run(quick_run.settings(training=training, checkpoint={"keep": 0}), tmp_path / "run")
    last = open_run(tmp_path / "run").rounds[-1]
    assert last < 9
    assert contribution(tmp_path / "run", tmp_path / "out", "--clients", "0") == 0
    assert contribution(tmp_path / "run", tmp_path / "out", "--clients", "0") == 0  # again, nothing is left to do
    retrained = quick_run.settings(
        training={**training, "stop": None, "without_clients": [0]}, checkpoint={"keep": 0}
    )  # which would stop in another round
    quick_run.run(retrained, tmp_path / "retrained")
    without = open_run(tmp_path / "out/without-0")
    assert without.rounds[-1] == last
    expected = open_run(tmp_path / "retrained").round(last).metrics["accuracy"]
    np.testing.assert_array_equal(without.round(last).metrics["accuracy"], expected)


def test_the_run_without_a_client_goes_on_to_the_last_round_that_its_parent_has_now(whole, tmp_path, capfd):
    for copy in ("run", "before"):
        shutil.copytree(whole, tmp_path / copy)
    assert contribution(tmp_path / "run", tmp_path / "out", "--clients", "2") == 0
    quick_run.resume(tmp_path / "run", ["training.rounds=5"])
    assert contribution(tmp_path / "run", tmp_path / "out", "--clients", "2") == 0
    retrained = quick_run.settings(training={"rounds": 5, "without_clients": [2]}, checkpoint={"keep": 0})
    digest = quick_run.run(retrained, tmp_path / "retrained")
    assert quick_run.digest(tmp_path / "out/without-2") == digest
    assert contribution(tmp_path / "before", tmp_path / "out", "--clients", "2") == 2
    assert "ends where that run did; choose another --out" in capfd.readouterr().err


def test_a_run_whose_data_have_moved_is_told_where_they_are(tmp_path, capfd):
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.savez(tmp_path / "before.npz", x=x, y=np.arange(60) % 3)
    raw = quick_run.settings(data={"name": None, "path": str(tmp_path / "before.npz")}, algorithm={"name": "fedavg"})
    quick_run.run({**raw, "checkpoint": {"keep": 0}}, tmp_path / "run")
    moved = (tmp_path / "before.npz").rename(tmp_path / "after.npz")
    assert contribution(tmp_path / "run", tmp_path / "out", "--clients", "2") == 2
    assert "name its new place: -s data.path=FILE" in capfd.readouterr().err
    assert contribution(tmp_path / "run", tmp_path / "out", "--clients", "2", "-s", f"data.path={moved}") == 0
    again = moved.rename(tmp_path / "again.npz")
    (tmp_path / "out/without-2/round_00003.h5").unlink()
    assert contribution(tmp_path / "run", tmp_path / "out", "--clients", "2", "-s", f"data.path={again}") == 0
    assert contribution(tmp_path / "run", tmp_path / "out", "--clients", "2", "-s", "training.lr=9") == 2
    assert "was made with another configuration: training.lr" in capfd.readouterr().err


def test_a_run_without_accuracies_is_refused(tmp_path, capfd):
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    np.savez(tmp_path / "numbers.npz", x=x, y=x.sum(1))
    data = {"path": str(tmp_path / "numbers.npz"), "task": "regression"}
    partition, model = {"name": "iid", "clients": 4}, {"name": "mlp", "hidden": 4}
    raw = quick_run.settings(data=data, partition=partition, model=model, algorithm={"name": "fedavg"})
    quick_run.run(raw, tmp_path / "run")
    assert contribution(tmp_path / "run", tmp_path / "out", "--clients", "2") == 2
    assert "has no accuracy" in capfd.readouterr().err
