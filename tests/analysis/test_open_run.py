"""Reading a run without the runtime: configuration, metrics, and of the checkpoints only what is asked for."""

import csv
import shutil
import sys

import h5py
import numpy as np
import pandas
import pytest
import yaml

import pflmpi
import quick_run
from described import about
from pflmpi.analysis.run import Run, open_run
from pflmpi.errors import CheckpointError
from pflmpi.store import run_folder, verify

UNLIKE = [{"name": "cnn", "hidden": 12, "kernel": 3, "padding": 1}, {"name": "mlp", "hidden": 12}]


@pytest.fixture(scope="module")
def alike_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alike") / "run"
    quick_run.run(quick_run.settings(training={"rounds": 4}, evaluation={"every": 2}), folder, ranks=2)
    return folder


@pytest.fixture(scope="module")
def unlike_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unlike") / "run"
    quick_run.run(quick_run.settings(algorithm={"name": "fedproto"}, model=UNLIKE), folder, ranks=2)
    return folder


@pytest.fixture
def copy(alike_run, tmp_path):
    """A copy to be changed by a test."""
    return shutil.copytree(alike_run, tmp_path / "elsewhere")


def test_columns_are_what_the_file_says(alike_run):
    with (alike_run / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    columns = open_run(alike_run).columns
    assert list(columns) == list(lines[0]) and len(lines) == 4
    for name, column in columns.items():
        expected = [float(line[name] or "nan") for line in lines]
        np.testing.assert_array_equal(column, expected)
    assert columns["round"].dtype == columns["wire_up_bytes"].dtype == np.int64
    assert columns["seconds"].dtype == np.float64
    assert np.isnan(columns["accuracy_mean"]).tolist() == [True, False, True, False]  # tested every second round


def test_metrics_are_a_record_array_and_a_frame_is_of_pandas(alike_run, monkeypatch):
    run = open_run(alike_run)
    records, frame = run.metrics, run.frame()
    assert isinstance(records, np.recarray) and isinstance(frame, pandas.DataFrame)
    assert list(frame) == list(run.columns)
    for name, column in run.columns.items():
        for table in (frame[name].to_numpy(), records[name]):
            np.testing.assert_array_equal(table, column, strict=True)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run.metrics.seconds.tolist() == run.columns["seconds"].tolist()
    with pytest.raises(ModuleNotFoundError, match="pandas"):
        run.frame()


def test_a_run_stays_the_one_that_was_opened_when_the_working_directory_changes(alike_run, tmp_path, monkeypatch):
    monkeypatch.chdir(alike_run.parent)
    name = alike_run.name
    runs = [pflmpi.open_run(name), *pflmpi.open_runs([name]), *pflmpi.open_runs(f"{name}*")]
    expected, frame = runs[0].round().digest(), pflmpi.open_runs(name).frame()
    monkeypatch.chdir(tmp_path)
    for run in runs:
        assert run.round().digest() == expected and len(run.columns["round"]) == 4
        assert repr(run).startswith(f"Run({name!r}: ") and set(frame["run"]) == {name}


def test_the_configuration_is_the_resolved_one(alike_run):
    run = open_run(alike_run)
    assert run.config == yaml.safe_load((alike_run / "config.yaml").read_text())
    assert run.config["algorithm"]["critical_share"] == 0.5 and run.name == "fedgmh"
    assert run.config["recorded"]["versions"]["pflmpi"] == pflmpi.__version__


def test_a_round_gives_what_was_stored(alike_run):
    for number in (run := open_run(alike_run)).rounds:
        round = run.round(number)
        everyone = np.arange(7)
        ((ids, expected),) = run_folder.read_clients(alike_run, number, everyone).values()
        assert ids.tolist() == everyone.tolist() and list(round.clients) == sorted(expected)
        for leaf, array in expected.items():
            actual = round.clients[leaf]
            assert (dotted := leaf.replace("/", ".")) in round.clients and round.clients.get(dotted) is actual
            assert actual.shape == array.shape and actual.dtype == array.dtype and actual.nbytes == array.nbytes
            np.testing.assert_array_equal(np.asarray(actual), array, strict=True)
        for opened, stored in (
            (round.server, run_folder.read_server(alike_run, number)),
            (round.metrics, run_folder.read_metrics(alike_run, number)),
            (round.bytes, run_folder.read_bytes(alike_run, number)),
        ):
            assert opened.keys() == stored.keys()
            for name, array in stored.items():
                np.testing.assert_array_equal(opened[name], array, strict=True)
        assert round.digest() == run_folder.digest(alike_run, number) and round.verify() == []


def test_only_the_shards_of_the_wanted_clients_are_read(copy):
    layout = run_folder.read_layout(copy, 4)
    rows = open_run(copy).round(4).clients["model/head/weight"]
    array = np.asarray(rows)
    for name in layout.files:
        if name != layout.files[layout.file[2]]:
            (copy / name).unlink()
    np.testing.assert_array_equal(rows[2], array[2])
    with pytest.raises(CheckpointError, match="is missing"):
        np.asarray(rows)


def test_a_leaf_may_be_named_with_dots_and_a_wrong_name_gets_a_suggestion(alike_run):
    clients = open_run(alike_run).round().clients
    assert clients["model/head.weight"] is clients["model/head/weight"]
    assert "model/head/wait" not in clients
    with pytest.raises(KeyError, match="did you mean 'model/head/weight'"):
        clients["model/head/wait"]


def test_unlike_models_have_their_leaves_by_cohort(unlike_run):
    round = open_run(unlike_run).round()
    assert {name: ids.tolist() for name, ids in round.cohorts.items()} == {
        "cohort0": [0, 2, 4, 6],
        "cohort1": [1, 3, 5],
    }
    stored = run_folder.read_clients(unlike_run, round.number, np.arange(7))
    assert set(round.clients) == {f"{cohort}/{leaf}" for cohort, (_, rows) in stored.items() for leaf in rows}
    for cohort, (ids, leaves) in stored.items():
        for leaf, array in leaves.items():
            rows = round.clients[f"{cohort}/{leaf}"]
            assert rows.clients.tolist() == ids.tolist()
            np.testing.assert_array_equal(np.asarray(rows), array, strict=True)


def test_clients_that_keep_nothing_have_no_leaves(tmp_path):
    quick_run.run(quick_run.settings(algorithm={"name": "fedavg"}, training={"rounds": 1}), tmp_path / "run")
    round = open_run(tmp_path / "run").round()
    assert len(round.clients) == 0 and round.cohorts["cohort0"].tolist() == list(range(7))


def test_checkpoints_alone_are_a_run_too(alike_run, copy):
    (copy / "config.yaml").unlink()
    (copy / "metrics.csv").unlink()
    run = open_run(copy)
    assert run.config == open_run(alike_run).config and run.name == "fedgmh"
    with pytest.raises(CheckpointError, match=r"metrics.csv is missing; `pflmpi resume .*` begins a new one"):
        _ = run.columns


def test_a_run_that_is_still_writing_gives_what_is_complete(copy):
    with (copy / "metrics.csv").open("a") as file:
        file.write("5,3,0.7")  # and the rest of the line is on its way
    (copy / "round_00005.h5.tmp").write_bytes(b"half a file")
    (copy / "shards" / "round_00005_rank_000.h5").write_bytes(b"of a round that is not there yet")
    run = open_run(copy)
    assert run.columns["round"].tolist() == [1, 2, 3, 4]
    assert run.rounds == [2, 3, 4] and run.round().number == 4
    shutil.copy(copy / "round_00004.h5", copy / "round_00005.h5")
    assert run.rounds == [2, 3, 4, 5]


def test_a_run_that_has_just_begun_is_open(copy):
    for path in copy.glob("round_*.h5"):
        path.unlink()
    header, _, _ = (copy / "metrics.csv").read_text().partition("\n")
    (copy / "metrics.csv").write_text(f"{header}\n")
    run = open_run(copy)
    assert run.rounds == [] and run.columns["round"].size == 0
    with pytest.raises(CheckpointError, match="no good checkpoint: none has been written yet"):
        run.round()


@pytest.mark.parametrize("reader", [lambda run: run.round(4), lambda run: run.round(4).clients])
def test_a_truncated_round_file_is_refused_with_both_lengths(copy, reader):
    path = copy / "round_00004.h5"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    run = open_run(copy)
    with pytest.raises(CheckpointError, match=rf"damaged: {len(content) // 2} bytes long, {len(content)} were written"):
        reader(run)
    with pytest.warns(UserWarning, match=r"round 3 stands for a newer one: .* is damaged"):
        assert run.round().number == 3  # the newest that is whole


def test_a_round_with_a_truncated_shard_is_refused_and_the_round_before_is_the_newest(copy):
    (shard,) = (copy / "shards").glob("round_00004_rank_*.h5")  # which all ranks share
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    run = open_run(copy)
    with pytest.raises(CheckpointError, match=rf"{shard.name} is damaged: \d+ bytes long"):
        run.round(4)
    with pytest.warns(UserWarning, match="round 3 stands for a newer one"):
        assert run.round().number == 3
    assert "bytes long" in verify.problems(copy, 4)[0]


def test_a_flipped_bit_in_what_is_read_whole_is_found(copy):
    rows = open_run(copy).round(4).clients["model/head/weight"]
    values = np.asarray(rows)[0].tobytes()
    layout = run_folder.read_layout(copy, 4)
    shard = copy / layout.files[layout.file[0]]
    content = bytearray(shard.read_bytes())
    content[content.index(values)] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="CRC-32"):
        np.asarray(rows)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.yaml", b"- a list", "is not as it was written"),
        ("config.yaml", b"\xff\xfe", "is not as it was written"),
        ("metrics.csv", b"round,seconds\n1,fast\n", "differs from what round 4 recorded, in lines 1 to 5"),
        ("metrics.csv", b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(copy, name, content, complaint):
    (copy / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        _ = open_run(copy).columns
    assert str(copy / name) in str(caught.value)


def test_what_is_no_run_or_has_no_such_round_is_refused(alike_run, tmp_path):
    (tmp_path / "notes.txt").write_text("no run")
    for path, message in (
        ("nothing", "is no folder"),
        ("notes.txt", "is no folder"),
        ("", "is not a run: it has"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_run(tmp_path / path)
    with pytest.raises(CheckpointError, match="no checkpoint of round 1; it has 2-4"):
        open_run(alike_run).round(1)


def test_the_package_opens_runs_and_has_nothing_else_that_is_unknown(alike_run):
    assert isinstance(pflmpi.open_run(alike_run), Run)
    with pytest.raises(AttributeError, match="has no attribute 'close_run'"):
        _ = pflmpi.close_run


def test_a_file_that_the_reader_has_open_is_read_all_the_same(alike_run):
    with h5py.File(alike_run / "round_00004.h5") as file:
        assert open_run(alike_run).round().number == 4 and about(file)["run"]["round"] == 4


def test_a_figure_in_a_notebook_is_a_chart_with_the_values_of_the_run(alike_run):
    run = open_run(alike_run)
    chart = run.figures.accuracy().to_dict()
    (rows,) = [chart["data"]["values"]] if "values" in chart["data"] else chart["datasets"].values()
    accuracy = 100 * run.columns["accuracy_mean"]
    expected = accuracy[~np.isnan(accuracy)].tolist()
    assert [row["y"] for row in rows if row["series"] == run.name] == pytest.approx(expected, rel=1e-4)
    assert {"seconds_per_round", "partition", "accuracy_over_rounds"} <= run.figures.all().keys()
    with pytest.raises(CheckpointError, match="no round has been evaluated yet"):
        nothing = np.full(len(accuracy), np.nan)
        run.__dict__["columns"] = {**run.columns, "accuracy_mean": nothing, "test_loss": nothing}
        run.figures.accuracy()
