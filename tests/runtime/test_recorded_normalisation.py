"""`normalize: standard`: its figures are in the run, and are the ones that count from then on."""

from dataclasses import replace

import h5py
import numpy as np
import pytest

import quick_run
from described import about
from pflmpi.analysis.run import open_run
from pflmpi.data import dataset, loading, unseen

RNG = np.random.default_rng(0)


@pytest.fixture
def table(tmp_path):
    x, who = RNG.normal(5, [1, 2, 30], (200, 3)), np.arange(200) % 5
    np.savez(tmp_path / "my.npz", x=x, y=(x[:, 0] > 5).astype(int), client=who)
    return tmp_path / "my.npz"


def of_another_library(found, samples=None):
    """The figures of a library that adds up differently, much exaggerated."""
    ours = dataset.standardised(found, samples)
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
    whole = quick_run.run(raw, tmp_path / "whole")
    np.savez(tmp_path / "new.npz", x=RNG.normal(9, 9, (50, 3)), y=np.arange(50) % 2)
    words = ["evaluate", str(tmp_path / "whole"), "--data", str(tmp_path / "new.npz"), "-o"]
    assert quick_run.command([*words, str(tmp_path / "before.csv")]) == 0
    quick_run.run(quick_run.settings(raw, training={"rounds": 1}), tmp_path / "run")
    for module in (loading, unseen):
        monkeypatch.setattr(module, "standardised", of_another_library)
    assert quick_run.run(raw, tmp_path / "other") != whole, "the figures matter"
    assert quick_run.resume(tmp_path / "run", ("training.rounds=3",), ranks=2) == whole
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
            said = about(file)["normalisation"]
            np.testing.assert_allclose(said["mean"], x.mean(0, np.float64), rtol=1e-12)
            np.testing.assert_allclose(said["std"], x.std(0, dtype=np.float64), rtol=1e-12)
    found = open_run(tmp_path / "run").round().normalisation
    shown = " ".join(f"{value:.4g}" for value in found["mean"])
    assert quick_run.command(["inspect", str(tmp_path / "run")]) == 0
    assert f"samples are normalised: mean {shown}, deviation" in capsys.readouterr().out
    assert quick_run.command(["data", str(table)]) == 0
    assert f"standard mean {shown}, deviation" in capsys.readouterr().out


def test_bytes_are_normalised_as_the_checkpoint_says(tmp_path):
    quick_run.run(quick_run.settings(), tmp_path)
    found = open_run(tmp_path).round().normalisation
    assert (found["mean"].tolist(), found["std"].tolist()) == ([0.5], [0.5])
