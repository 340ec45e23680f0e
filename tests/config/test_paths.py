"""Paths with ~ and $NAME, in configurations, in options and from Python."""

from pathlib import Path

import pytest

import pflmpi
from pflmpi.cli import main, parser
from pflmpi.config.load import load
from pflmpi.config.sections import located
from pflmpi.data.config import DataConfig
from pflmpi.data.loading import load as load_data
from pflmpi.errors import ConfigError, DataError
from pflmpi.machine import expand_path, private_folder
from pflmpi.runtime.client_state import choose_state_folder
from pflmpi.runtime.config import RuntimeConfig


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home, and $DATA in it; the working directory is neither."""
    for name in ("home", "home/data", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DATA", str(tmp_path / "home" / "data"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.mark.parametrize("text", ["~/data/x", "$HOME/data/x", "${HOME}/data/x", "$DATA/x"])
def test_they_are_expanded_in_every_file_of_a_configuration(text, home):
    raw = {
        "data": {"path": text, "transform": [f"{text}.py:flip"]},
        "partition": {"path": text},
        "model": {"name": f"{text}.py:Net", "weights": text},
        "output": {"trackers": [f"{text}.py:Mine"]},
    }
    data, partition, model, output = located(raw, Path("elsewhere")).values()
    file = str(home / "data" / "x")
    assert data == {"path": file, "transform": [f"{file}.py:flip"]} and partition == {"path": file}
    assert model == {"name": f"{file}.py:Net", "weights": file} and output == {"trackers": [f"{file}.py:Mine"]}


def test_folders_are_below_the_configuration_as_files_are():
    trackers = [{"name": "mlflow", "store": text} for text in ("runs", "http://host:5000", "$DATA/runs")]
    raw = {"data": {"root": "data"}, "runtime": {"cache": "../c", "scratch": "s"}, "output": {"trackers": trackers}}
    data, runtime, output = located(raw, Path("/there/configs")).values()
    assert (data, runtime) == (
        {"root": "/there/configs/data"},
        {"cache": "/there/c", "scratch": "/there/configs/s"},
    )
    assert [tracker["store"] for tracker in output["trackers"]] == [
        *("/there/configs/runs", "http://host:5000", "$DATA/runs"),
    ]


def test_folders_that_may_be_others_on_each_node_stay_as_they_are():
    raw = {"data": {"root": "~/data"}, "runtime": {"cache": None, "scratch": "$TMPDIR/x"}}
    assert located(raw, Path("/there")) == raw


def test_they_are_expanded_in_the_folders_of_a_configuration(home):
    assert (
        choose_state_folder(RuntimeConfig(state="disk", scratch="$DATA/scratch"), Path()) == home / "data" / "scratch"
    )
    assert private_folder("~/cache") == home / "cache"
    with pytest.raises(DataError, match=str(home / "data" / "none")):
        load_data(DataConfig(name="mnist", root="$DATA/none"), 0)


def test_they_are_expanded_in_what_status_shows(home, capfd):
    assert main(["status", "~/data/run"]) == 2
    assert f"{home}/data/run is not the folder of a run" in capfd.readouterr().err


def test_they_are_expanded_in_options_and_from_python(home):
    options = parser("run").parse_args(["run", "--out=~/runs", "$DATA/c.yaml"])
    assert (options.out, options.config) == (home / "runs", home / "data" / "c.yaml")
    (home / "data" / "c.yaml").write_text(
        "data: {name: digits}\npartition: {name: iid, clients: 2}\nalgorithm: {name: fedavg}\n"
    )
    assert pflmpi.Config.load("$DATA/c.yaml").data == load(home / "data" / "c.yaml").data
    with pytest.raises(pflmpi.errors.CheckpointError, match=str(home / "data" / "run")):
        pflmpi.open_run("~/data/run")


def test_a_variable_that_is_not_set_is_refused_by_name(capsys):
    with pytest.raises(ConfigError, match=r"\$NOPE/x: the variable NOPE is not set; set it"):
        expand_path("$NOPE/x")
    with pytest.raises(SystemExit) as ended:
        main(["run", "c.yaml", "--out", "/tmp/${NOPE}/x"])
    assert ended.value.code == 2 and "argument --out: /tmp/${NOPE}/x: the variable NOPE" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_a_folder_that_has_such_a_name_is_itself():
    for name in ("a$NOPE", "$HOME", "~"):
        Path(name).mkdir()
        assert expand_path(f"{name}/b") == Path(name, "b")
