"""`run.to_xarray`: the state over rounds by names of axes, of which only what is used is read."""

from pathlib import Path

import numpy as np
import pytest

import quick_run
from pflmpi.analysis import checkpoint
from pflmpi.analysis.run import Run, open_run
from pflmpi.errors import CheckpointError, ConfigError

HEAD = "model/head/weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("lazy") / "run"
    quick_run.run(quick_run.settings(checkpoint={"keep": 0}), folder, ranks=2)
    return open_run(folder)


def test_every_leaf_is_an_array_over_rounds_with_named_axes(run):
    arrays = run.to_xarray()
    assert set(arrays) == {*run.round().clients, *(f"server/{path}" for path in run.round().server)}
    assert arrays[HEAD].dims == ("round", "client", "class", "feature")
    assert arrays["server/heads/bias"].dims == ("round", "size_10", "size_10.2")
    assert arrays["round"].to_numpy().tolist() == run.rounds and arrays["client"].to_numpy().tolist() == list(range(7))
    for path in run.round().clients:
        expected = np.stack([np.asarray(run.round(number).clients[path]) for number in run.rounds])
        np.testing.assert_array_equal(arrays[path].to_numpy(), expected, strict=True)
    expected = np.stack([run.round(number).server["heads/bias"] for number in run.rounds])
    np.testing.assert_array_equal(arrays["server/heads/bias"].to_numpy(), expected, strict=True)


def test_an_index_of_any_kind_gives_what_numpy_gives(run):
    head = run.to_xarray(leaves=HEAD)[HEAD]
    array = head.to_numpy()
    chosen = head.isel(round=[2, 0], client=[5, 1], feature=[3, 4, 0])
    np.testing.assert_array_equal(chosen.to_numpy(), array[np.ix_([2, 0], [5, 1], range(10), [3, 4, 0])])
    np.testing.assert_array_equal(head[::-1, ::-2, 3].to_numpy(), array[::-1, ::-2, 3])
    np.testing.assert_array_equal(head.sel({"client": 3, "class": "4"}).to_numpy(), array[:, 3, 4])
    assert head[:0, 2:4].to_numpy().shape == (0, 2, 10, 12)


def test_only_the_rows_and_rounds_that_are_used_are_read(run, monkeypatch):
    reads, read_leaf = [], checkpoint.read_leaf

    def spy(folder, layout, cohort, leaf, clients, like):
        reads.append((leaf, clients.tolist()))
        return read_leaf(folder, layout, cohort, leaf, clients, like)

    monkeypatch.setattr(checkpoint, "read_leaf", spy)
    arrays = run.to_xarray()
    head = arrays["model/head.weight".replace(".", "/")].sel(client=[6, 2], round=[1, 3])
    assert reads == []
    assert head.to_numpy().shape == (2, 2, 10, 12)
    assert reads == [(HEAD, [2, 6])] * 2


def test_a_model_of_each_kind_has_its_own_clients(tmp_path):
    models = [{"name": "cnn", "hidden": 12, "kernel": 3, "padding": 1}, {"name": "mlp", "hidden": 12}]
    settings = quick_run.settings(algorithm={"name": "fedproto"}, model=models, training={"rounds": 1})
    quick_run.run(settings, tmp_path / "run")
    opened = open_run(tmp_path / "run")
    head = opened.to_xarray(leaves=["cohort1/model/head.weight"])["cohort1/model/head/weight"]
    assert head.dims == ("round", "cohort1_client", "class", "feature")
    expected = opened.round().clients["cohort1/model/head/weight"][1]  # of client 3
    np.testing.assert_array_equal(head.sel(cohort1_client=3, round=1).to_numpy(), expected)


def test_unknown_rounds_and_leaves_are_named(run):
    with pytest.raises(CheckpointError, match="no checkpoint of round 9; it has 0-3"):
        run.to_xarray(rounds=[1, 9])
    with pytest.raises(CheckpointError, match="no rounds to read; it has checkpoints 0-3"):
        run.to_xarray(rounds=[])
    with pytest.raises(ConfigError, match="unknown leaf 'model/head/wait'; did you mean 'model/head/weight'"):
        run.to_xarray(leaves=["model/head/wait"])


def test_a_lost_round_is_named_when_it_is_read(tmp_path):
    quick_run.run(quick_run.settings(checkpoint={"keep": 0}), tmp_path / "run")
    arrays = open_run(tmp_path / "run").to_xarray()
    Path(tmp_path / "run" / "round_00002.h5").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint of round 2"):
        arrays[HEAD].to_numpy()
    assert arrays[HEAD].sel(round=3).to_numpy().shape == (7, 10, 12)
