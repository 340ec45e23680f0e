"""Several runs as one table."""

import sys

import pytest

import quick_run
from pflmpi.analysis.runs import open_runs
from pflmpi.errors import CheckpointError, UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for every, name in enumerate(("fedavg", "fedgmh"), 1):
        settings = {"algorithm": {"name": name}, "training": {"rounds": 2}, "checkpoint": {"every": every}}
        quick_run.run(quick_run.settings(**settings), folder / name)
    (folder / "notes").mkdir()
    return folder


def test_a_line_for_each_run_and_round_with_what_the_runs_differ_in(folder):
    runs = open_runs(f"{folder}/*")
    frame = runs.frame()
    assert frame["run"].tolist() == [str(folder / "fedavg")] * 2 + [str(folder / "fedgmh")] * 2
    assert list(frame.columns[:4]) == ["run", "algorithm.name", "data.name", "seed"]
    assert "algorithm.critical_share" in frame and "training.rounds" not in frame, "only keys that differ"
    assert "checkpoint.every" not in frame, "results do not depend on it"
    assert frame["round"].tolist() == [1, 2, 1, 2]
    assert frame["accuracy_mean"].tolist() == [float(v) for run in runs for v in run.columns["accuracy_mean"]]


def test_a_line_that_is_being_written_is_left_out(folder, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "metrics.csv"):
        (tmp_path / "run" / name).write_bytes((folder / "fedavg" / name).read_bytes())
    with open(tmp_path / "run" / "metrics.csv", "a") as file:
        file.write("3,2,0.")
    assert open_runs([tmp_path / "run"]).frame()["round"].tolist() == [1, 2]


def test_nothing_found_and_no_pandas_are_said(folder, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="matches no run; give a pattern"):
        open_runs(tmp_path / "*")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="needs pandas, which is not installed"):
        open_runs(f"{folder}/*").frame()
