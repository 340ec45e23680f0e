"""A line for each client and round: in Python, and as CSV and Parquet."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest

import quick_run
from pflmpi.analysis.run import Run, open_run
from pflmpi.analysis.runs import open_runs
from pflmpi.cli import main
from pflmpi.errors import CheckpointError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("clients") / "run"
    settings = quick_run.settings(algorithm={"name": "fesem"}, evaluation={"when": "both"}, checkpoint={"keep": 0})
    quick_run.run(settings, folder, ranks=2)
    return open_run(folder)


def test_each_client_of_each_round_has_what_the_checkpoint_says_of_it(run):
    table = run.clients_table()
    assert table["round"].tolist() == np.repeat(run.rounds, 7).tolist()
    assert table["client"].tolist() == list(range(7)) * len(run.rounds)
    state, lines = run.round(2), table[table["round"] == 2]
    for column, expected in {
        "accuracy": state.metrics["accuracy"],
        "test_loss": state.metrics["client_test_loss"],
        "test_samples": state.metrics["total"],
        "up_bytes": state.bytes["up"],
        "down_bytes": state.bytes["down"],
        "train_samples": run.counts.train.sum(1),
        "diagnostic_clusters": np.where(state.server["cluster"] < 0, np.nan, state.server["cluster"]),
        "round_seconds": np.full(7, state.metrics["seconds_round"]),
    }.items():
        np.testing.assert_array_equal(lines[column].to_numpy(), expected, err_msg=column)


def test_round_0_has_the_columns_that_are_always_there(run):
    table = run.clients_table([0])
    assert table[["up_bytes", "down_bytes"]].isna().all(axis=None)
    assert {"participant", "train_samples", "test_samples"} <= {*table} and not table["participant"].any()


def test_what_participants_alone_have_is_empty_for_the_others(run):
    state, lines = run.round(2), run.clients_table([2])
    trained = lines["participant"].to_numpy()
    assert np.flatnonzero(trained).tolist() == state.participants.tolist() and 0 < trained.sum() < 7
    for column, name in (("train_loss", "client_train_loss"), ("trained_accuracy", "trained_accuracy")):
        assert lines[column][trained].tolist() == state.metrics[name].tolist()
        assert lines[column][~trained].isna().all()


def test_a_measure_whose_name_has_client_in_it_has_a_column_of_its_own(tmp_path):
    code, text = tmp_path / "mine.py", "def {}(scores, labels):\n    return 1.0\n\n\n"
    code.write_text(text.format("per_gap") + text.format("per_client_gap"))
    measures = {"measures": ["accuracy", f"{code}:per_gap", f"{code}:per_client_gap"], "when": "both"}
    quick_run.run(quick_run.settings(evaluation=measures, training={"rounds": 1}), tmp_path / "run")
    table = open_run(tmp_path / "run").clients_table([1])
    names = {"per_gap", "per_client_gap", "trained_per_gap", "trained_per_client_gap"}
    assert {name for name in table if name.endswith("gap")} == names


@pytest.mark.parametrize(("suffix", "read"), [("csv", pandas.read_csv), ("parquet", pandas.read_parquet)])
def test_the_command_writes_the_table(run, tmp_path, suffix, read, capfd):
    path = tmp_path / f"clients.{suffix}"
    assert main(["export", str(run.path), "--table", str(path)]) == 0
    assert f"{path}: 28 lines of fesem, of the rounds 0-3" in capfd.readouterr().out
    pandas.testing.assert_frame_equal(
        read(path), run.clients_table(), check_exact=True, check_dtype=suffix == "parquet"
    )
    assert main(["export", str(run.path), "--table", str(path), "--round", "3", "--force"]) == 0
    assert read(path)["round"].tolist() == [3] * 7


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--table", "clients.txt"], "unknown suffix '.txt'; known: .csv, .parquet"),
        (["--table", "clients.csv", "-o", "one.h5"], "-o cannot go with --table"),
        (["--table", "there.csv"], "is there already"),
        (["--table", "clients.csv", "--round", "9"], "no checkpoint of round 9; it has 0-3"),
        (["--server"], "export needs -o FILE"),
    ],
)
def test_what_cannot_be_written_is_refused(run, tmp_path, monkeypatch, words, complaint, capfd):
    monkeypatch.chdir(tmp_path)
    Path("there.csv").write_text("precious")
    assert main(["export", str(run.path), *words]) == 2
    assert complaint in capfd.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["there.csv"]


def test_a_missing_library_is_named_with_its_extra(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", str(run.path), "--table", str(tmp_path / "clients.parquet")]) == 2
    assert "needs pyarrow, which is not installed" in (err := capfd.readouterr().err) and "pflmpi[analysis]" in err


def test_several_runs_are_one_table_with_what_they_differ_in(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "fesem")
    quick_run.run(quick_run.settings(algorithm={"name": "fedavg"}, training={"rounds": 1}), tmp_path / "fedavg")
    runs = open_runs(f"{tmp_path}/*")
    table = runs.clients_table()
    assert table["run"].tolist() == [str(tmp_path / "fedavg")] * 14 + [str(tmp_path / "fesem")] * 28
    assert set(table["algorithm.name"]) == {"fedavg", "fesem"} and table["diagnostic_clusters"].isna().sum() >= 14
    for path in (tmp_path / "fedavg").glob("round_*.h5"):
        path.unlink()
    assert runs.clients_table()["run"].tolist() == [str(tmp_path / "fesem")] * 28, "a run that has just begun"
    assert runs[:1].clients_table().empty


def test_a_damaged_round_is_named(run, tmp_path):
    copy = shutil.copytree(run.path, tmp_path / "run")
    path = copy / "round_00002.h5"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"round_00002.h5 is damaged"):
        open_run(copy).clients_table()
