"""Predicted bytes of checkpoints are about those that a run writes and keeps."""

import h5py
import numpy as np
import pytest

import quick_run
from every_algorithm import every_algorithm
from pflmpi.forecast.bytes import compute_state_sizes, forecast_disk
from planned_run import planned, planned_and_run

TOLERANCE = 0.02  # of rows and states; what HDF5 and texts take in small files is only about known
LARGE = {"name": "mlp", "hidden": 2000}


def forecast_of(world):
    return forecast_disk(world.setup, world.experiment.config, compute_state_sizes(world.experiment))


def on_disk(folder):
    return sum(path.stat().st_size for path in folder.rglob("*.h5"))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("checkpoint", [{"keep": 0}, {"keep": 1, "every": 2}])
@pytest.mark.parametrize("name", ["fedavg", "fedgmh-full", "fesem"])
def test_what_stays_is_predicted(name, checkpoint, ranks, tmp_path):
    sections = every_algorithm()[name]
    raw = quick_run.settings(
        sections, checkpoint=checkpoint, training={**sections["training"], "rounds": 5}, model=LARGE
    )
    world = planned_and_run(raw, ranks, tmp_path / "run")
    predicted = forecast_of(world)
    written = on_disk(tmp_path / "run")  # equal rows of the first checkpoint may be written once
    assert (1 - TOLERANCE) * written < predicted.last < 1.25 * written
    assert predicted.most >= predicted.last
    assert predicted.count == (4 if checkpoint.get("every") == 2 else 6)


def test_files_of_a_small_run_are_about_as_large_as_predicted(tmp_path):
    world = planned_and_run(quick_run.settings(checkpoint={"keep": 0}), 2, tmp_path / "run")
    assert forecast_of(world).last == pytest.approx(on_disk(tmp_path / "run"), rel=0.3)


@pytest.mark.parametrize(
    ("validation", "evaluation"),
    [
        (0.0, {}),
        (0.2, {}),
        (0.0, {"when": "both"}),
        (0.0, {"unseen": 0.5}),
        (0.2, {"when": "both"}),
        (0.2, {"when": "both", "unseen": 0.5}),
    ],
)
def test_no_run_writes_more_than_predicted_whatever_it_tests(validation, evaluation, tmp_path):
    """Many clients and classes, so that most bytes are test results."""
    drawn = np.random.default_rng(0)
    labels = drawn.permutation(np.arange(2400) % 40)
    np.savez(tmp_path / "data.npz", x=drawn.normal(size=(2400, 4)).astype(np.float32), y=labels)
    raw = quick_run.settings(
        data={"path": str(tmp_path / "data.npz"), "limit": None, "validation": validation},
        partition={"name": "iid", "clients": 150},
        model={"name": "logistic"},
        algorithm={"name": "fedavg"},
        training={"rounds": 2},
        evaluation=evaluation,
        checkpoint={"keep": 0},
    )
    world = planned_and_run(raw, 1, tmp_path / "run")
    written = on_disk(tmp_path / "run")
    assert written <= forecast_of(world).last < 1.1 * written


def test_nothing_is_written(monkeypatch):
    monkeypatch.setattr(h5py, "File", None)
    assert forecast_of(planned(quick_run.settings(), 2)).count == 4


def test_the_first_checkpoint_has_every_client_and_later_ones_those_that_changed(tmp_path):
    """A client's state is large, and 3 of 7 train in a round."""
    raw = quick_run.settings(model=LARGE, checkpoint={"keep": 0})
    world = planned_and_run(raw, 2, tmp_path / "run")
    predicted = forecast_of(world)
    shards = tmp_path / "run" / "shards"
    first = sum(path.stat().st_size for path in shards.glob("round_00000*"))
    first += (tmp_path / "run" / "round_00000.h5").stat().st_size
    assert predicted.first == pytest.approx(first, rel=TOLERANCE)
    assert predicted.later == pytest.approx((on_disk(tmp_path / "run") - first) / 3, rel=TOLERANCE)
    assert predicted.later < 0.6 * predicted.first


def test_all_that_is_kept_grows_with_the_rounds_and_what_is_pruned_does_not():
    def last(keep, rounds):
        world = planned(quick_run.settings(checkpoint={"keep": keep}, training={"rounds": rounds}), 1)
        return forecast_of(world).last

    assert last(0, 40) > 1.8 * last(0, 20)
    assert last(2, 40) < last(0, 40) / 4


def test_more_checkpoints_than_are_looked_at_go_on_like_these(monkeypatch):
    world = planned(quick_run.settings(checkpoint={"keep": 0}, training={"rounds": 30}), 1)
    full = forecast_of(world)
    monkeypatch.setattr("pflmpi.forecast.bytes._MAX_CHECKPOINTS", 15)
    part = forecast_of(world)
    assert part.count == full.count == 31
    assert part.last == pytest.approx(full.last, rel=0.05)  # who takes part differs from round to round
