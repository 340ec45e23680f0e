"""`pflmpi fork`: a new run from a checkpoint of another, in a folder that needs no other."""

import os
import re
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import quick_run
from pflmpi import atomic
from pflmpi.analysis.run import open_run
from pflmpi.analysis.selection import name_runs
from pflmpi.analysis.series.accuracy import plot_main_measure
from pflmpi.analysis.series.cost import plot_against_bytes
from pflmpi.cli import main
from pflmpi.config import stored
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.experiment import fork as forking
from pflmpi.experiment import stored_config
from pflmpi.store import checked_hdf5, config_file, metrics_file, run_folder, verify
from pflmpi.store.names import SHARDS, round_path

ROUNDS = 5


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent") / "run"
    quick_run.run(quick_run.settings(training={"rounds": ROUNDS}, checkpoint={"keep": 0}), folder)
    return folder


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fork(run, out, *words):
    return main(["fork", str(run), "--out", str(out), *words])


@pytest.mark.parametrize("ranks", [1, 3])
def test_without_changes_it_becomes_the_parent_bit_for_bit(parent, tmp_path, ranks, capfd):
    run, before = shutil.copytree(parent, tmp_path / "run"), files(parent)
    assert fork(run, tmp_path / "fork", "--round", "2") == 0
    assert "after round 2, nothing is changed" in capfd.readouterr().out
    assert files(run) == before
    shutil.rmtree(run)  # nothing in it points out of its folder
    assert run_folder.rounds(tmp_path / "fork") == [2]
    assert main(["inspect", str(tmp_path / "fork"), "--verify"]) == 0
    origin = open_run(tmp_path / "fork").recorded["fork"]
    assert origin["run"] == open_run(parent).recorded["run"] != open_run(tmp_path / "fork").recorded["run"]
    assert origin["round"] == 2 and origin["digest"] == run_folder.digest(parent, 2) and not origin["changes"]
    assert quick_run.resume(tmp_path / "fork", (), ranks) == quick_run.digest(parent)
    for round in range(3, ROUNDS + 1):
        assert run_folder.digest(tmp_path / "fork", round) == run_folder.digest(parent, round)
    assert open_run(tmp_path / "fork").recorded["fork"] == origin, "which is kept"
    assert config_file.recorded(config_file.read_newest_attributes(tmp_path / "fork"))["fork"] == origin
    assert main(["inspect", str(tmp_path / "fork"), "--verify"]) == 0
    columns = [open_run(path).columns["accuracy_mean"] for path in (parent, tmp_path / "fork")]
    assert np.array_equal(*columns)


def test_it_goes_on_with_another_rate_and_without_clients(parent, tmp_path, capfd):
    words = ["-s", "training.lr=0.01", "--without-client", "2,5", "--without-client", "2"]
    assert fork(parent, tmp_path / "fork", "--round", "3", *words) == 0
    assert main(["inspect", str(tmp_path / "fork")]) == 0
    text = f"fork of run {open_run(parent).recorded['run']} after round 3: training.lr, training.without_clients"
    assert text in capfd.readouterr().out
    changes = open_run(tmp_path / "fork").recorded["fork"]["changes"]
    assert changes == {"training.lr": [0.1, 0.01], "training.without_clients": [[], [2, 5]]}
    digest = quick_run.resume(tmp_path / "fork")
    assert digest != quick_run.digest(parent)
    for round in (4, 5):
        drawn = run_folder.read_metrics(parent, round)["participants"].tolist()
        assert run_folder.read_metrics(tmp_path / "fork", round)["participants"].tolist() == sorted({*drawn} - {2, 5})
    again = open_run(tmp_path / "fork").fork(tmp_path / "again", round=3, without_clients=[0])
    assert again.config["training"]["without_clients"] == [0, 2, 5], "and those before"
    assert again.config["training"]["lr"] == 0.01
    assert again.recorded["fork"]["fork"] == open_run(tmp_path / "fork").recorded["fork"]


def test_from_python_as_from_the_command_line(parent, tmp_path):
    run = open_run(parent).fork(tmp_path / "a", round=3, training={"lr": 0.01}, without_clients=(2,))
    assert fork(parent, tmp_path / "b", "--round", "3", "-s", "training.lr=0.01", "--without-client", "2") == 0
    assert run.recorded["fork"] == open_run(tmp_path / "b").recorded["fork"]
    assert quick_run.resume(tmp_path / "a") == quick_run.resume(tmp_path / "b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-s", "model.hidden=9"], "model.hidden = 9 (in the run 12)"),
        (["-s", "seed=4"], "seed = 4 (in the run 3)"),
        (["-s", "data.limit=300"], "data.limit = 300"),
        (["-s", "partition.alpha=0.5"], "partition.alpha = 0.5 (in the run 0.7)"),
        (["-s", "training.init=per_client"], "training.init = 'per_client'"),
        (["-s", "algorithm={name: fedavg}"], "clients keep other arrays than those with this change, such as "),
        (["-s", "training.keep_optimizer=true", "-s", "training.momentum=0.9"], "such as optimizer"),
        (["-s", "training.rounds=2"], "training.rounds = 2, and the fork begins after round 3"),
        (["-s", "training.speed=2"], "speed"),
        (["--without-client", "7"], "the clients are 0 to 6"),
        (["--without-client", "0,1,2,3,4,5,6"], "nobody to train in round 4"),
        (["--round", "9"], "no checkpoint of round 9"),
    ],
)
def test_what_cannot_change_is_refused_by_name_and_nothing_is_written(parent, tmp_path, words, message, capfd):
    assert fork(parent, tmp_path / "fork", "--round", "3", *words) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "fork").exists()


def test_a_folder_with_a_run_and_a_damaged_round_are_refused(parent, tmp_path, capfd):
    assert fork(parent, parent, "--round", "3") == 2 and "holds a run already" in capfd.readouterr().err
    run = shutil.copytree(parent, tmp_path / "run")
    shard = run / run_folder.read_layout(run, 3).files[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 255
    shard.write_bytes(content)
    assert fork(run, tmp_path / "fork", "--round", "3") == 2 and "damaged" in capfd.readouterr().err
    assert not list((tmp_path).glob("fork/round*")) and not (tmp_path / "fork/config.yaml").exists()


def test_it_is_drawn_from_where_it_left_its_parent_if_that_is_shown_too(parent, tmp_path):
    fork(parent, tmp_path / "fork", "--round", "3", "-s", "training.lr=0.01")
    quick_run.resume(tmp_path / "fork")
    runs = [open_run(path) for path in (tmp_path / "fork", parent)]
    rounds = {curve.source: curve.x.tolist() for curve in plot_main_measure(name_runs(runs)).curves}
    assert [rounds[run.label] for run in name_runs(runs)] == [[3, 4, 5], [1, 2, 3, 4, 5]]
    sent = {curve.source: curve.x for curve in plot_against_bytes(name_runs(runs)).curves}
    assert [len(sent[run.label]) for run in name_runs(runs)] == [3, 5]
    assert np.array_equal(*(sent[run.label][place] for run, place in zip(name_runs(runs), (0, 2), strict=True)))
    assert plot_main_measure(name_runs(runs[:1])).curves[0].x.tolist() == [1, 2, 3, 4, 5], "the parent is not needed"
    folders = [str(run.path) for run in runs]
    assert main(["report", *folders, "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page/report.html").read_text()
    assert re.search(r"fork left \S+ \S*run after round 3, and is drawn from there", page)


def test_a_run_of_another_history_is_not_its_parent(parent, tmp_path):
    fork(parent, tmp_path / "fork", "--round", "3")
    copy = shutil.copytree(parent, tmp_path / "other")
    copy = replace(open_run(copy), path=tmp_path / "fork")  # the id of the parent, the metrics of another
    columns = open_run(parent).verified_metrics
    object.__setattr__(copy, "verified_metrics", replace(columns, texts=(columns.texts[0] + "1", *columns.texts[1:])))
    assert open_run(tmp_path / "fork").shared_rounds(open_run(parent)) == 3
    assert open_run(tmp_path / "fork").shared_rounds(copy) == 0
    assert open_run(parent).shared_rounds(open_run(tmp_path / "fork")) == 0


class Killed(BaseException):
    pass


def test_it_has_the_lines_of_its_rounds_alone_and_nothing_of_a_fork_that_was_killed(parent, tmp_path, monkeypatch):
    def killed(source, path):
        copy(source, path)
        if "00003" in path.name:
            raise Killed

    values, out, copy = stored_config.values(parent), tmp_path / "fork", checked_hdf5.copy_file
    monkeypatch.setattr(checked_hdf5, "copy_file", killed)
    with pytest.raises(Killed):
        forking.fork(parent, out, 3, values)
    monkeypatch.undo()
    assert any("00003" in path.name for path in (out / SHARDS).iterdir())
    forking.fork(parent, out, 1, values)
    assert {str(path.relative_to(out)) for path in (out / SHARDS).iterdir()} == {*run_folder.read_layout(out, 1).files}
    assert [line["round"] for line in metrics_file.read(out)] == ["1"]


def test_killed_at_any_file_it_is_no_run_or_a_whole_one(parent, tmp_path, monkeypatch):
    """And the same fork again makes it whole."""
    values, flush, seen = stored_config.values(parent), atomic.flush_folder, []

    def dying(left, folder):
        flush(folder)
        if next(left) == 0:
            raise Killed

    for at in range(20):
        out = tmp_path / str(at)
        monkeypatch.setattr(atomic, "flush_folder", partial(dying, iter(range(at, -1, -1))))
        try:
            forking.fork(parent, out, 3, values)
        except Killed:
            monkeypatch.setattr(atomic, "flush_folder", flush)
        else:
            break
        if round_path(out, 3).exists():
            assert verify.find_newest_good(out) == (3, []) and stored.read(out)["recorded"]["fork"]["round"] == 3
            if "whole" not in seen:
                assert quick_run.resume(out) == quick_run.digest(parent)
            seen.append("whole")
            continue
        with pytest.raises(CheckpointError, match="no checkpoint"):
            verify.find_newest_good(out)
        with pytest.raises(CheckpointError, match="not a run"):
            open_run(out)
        if not seen:
            forking.fork(parent, out, 3, values)
            assert quick_run.resume(out) == quick_run.digest(parent)
        seen.append("no run")
    assert {"whole", "no run"} == {*seen}, seen


def test_a_full_disk_is_one_error(parent, tmp_path, monkeypatch):
    def full(descriptor, content, position):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(atomic, "write_at", full)
    with pytest.raises(ConfigError, match="No space left on device; free space, or choose another --out"):
        forking.fork(parent, tmp_path / "fork", 3, stored_config.values(parent))


def test_other_measures_have_columns_of_their_own(parent, tmp_path, capfd):
    first, second = tmp_path / "first", tmp_path / "second"
    assert (
        fork(parent, first, "--round", "2", "-s", "evaluation.measures=[auroc]", "-s", "training.step_seconds=1") == 0
    )
    quick_run.resume(first, ("training.rounds=4",))
    assert fork(first, second, "--round", "3", "-s", "evaluation.measures=[balanced_accuracy]") == 0
    quick_run.resume(second)
    columns, of_parent = open_run(second).columns, open_run(parent).columns
    assert np.isnan(open_run(first).columns["auroc_mean"]).tolist() == [True, True, False, False]
    assert np.isnan(columns["balanced_accuracy_mean"]).tolist() == [True, True, True, False]
    assert "auroc_mean" not in columns and np.isnan(columns["simulated_seconds"]).tolist() == [True, True, False, False]
    for name in ("accuracy_mean", "up_bytes", "test_loss"):
        assert np.array_equal(columns[name], of_parent[name][:4])
    assert main(["inspect", str(second), "--verify"]) == 0, capfd.readouterr()


def test_naming_other_code_is_no_change_of_the_code_of_the_run(tmp_path, capfd):
    """A trace and a measure that a fork leaves, and a measure that it adds; what it keeps must be as it was."""
    trace, code, run = tmp_path / "trace.csv", tmp_path / "mine.py", tmp_path / "run"
    trace.write_text("round,client\n1,4\n2,0\n3,2\n")
    text = "def {}(scores, labels):\n    return float(len(labels))\n\n\n"
    code.write_text(text.format("size") + text.format("other"))
    training = {"selection": str(trace), "participation": 1.0, "rounds": 2}
    raw = quick_run.settings(training=training, evaluation={"measures": ["accuracy", f"{code}:size"]})
    quick_run.run(raw, run)
    for place, change in enumerate(["training.selection=uniform", f"evaluation.measures=[{code}:other]"]):
        assert fork(run, tmp_path / str(place), "-s", change) == 0, capfd.readouterr().err
    code.write_text(code.read_text() + "# changed\n")
    capfd.readouterr()
    assert fork(run, tmp_path / "changed", "-s", f"evaluation.measures=[{code}:size]") == 2
    assert "the code of measure/0 has changed" in capfd.readouterr().err
    assert fork(run, tmp_path / "without", "-s", "evaluation.measures=[accuracy]") == 0, capfd.readouterr().err
