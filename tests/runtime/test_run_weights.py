"""`model.weights: RUN@ROUND`: a run begins with the models that another had after a round."""

import logging
import shutil
from functools import cache

import numpy as np
import pytest
import torch

import quick_run
from pflmpi.analysis.bisection import differing_settings
from pflmpi.analysis.run import open_run
from pflmpi.config import load as configuration
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.experiment import outside_code
from pflmpi.store import run_folder
from pflmpi.sweep.pending import find_run_state

MODEL = quick_run.QUICK["model"]
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat, self.fc1, self.fc = nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 10)

    def forward(self, x):
        return self.fc(self.fc1(self.flat(x)).relu())
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")

    @cache
    def made(algorithm):
        raw = quick_run.settings(algorithm={"name": algorithm}, training={"rounds": 2}, checkpoint={"keep": 0})
        quick_run.run(raw, folder / algorithm)
        return folder / algorithm

    return made


def begun(algorithm, weights, **sections):
    raw = quick_run.settings(algorithm={"name": algorithm}, training={"rounds": 2}, checkpoint={"keep": 0})
    return quick_run.settings(raw, model={**MODEL, "weights": str(weights)}, **sections)


def clients(run, round):
    ((_, leaves),) = run_folder.read_clients(run, round, np.arange(7)).values()
    return leaves


def test_another_algorithm_begins_with_the_model_of_the_server(source, tmp_path):
    run = source("fedavg")
    digests = {quick_run.run(begun("fedrep", f"{run}@1"), tmp_path / str(ranks), ranks) for ranks in (1, 3)}
    assert len(digests) == 1
    model, server = run_folder.read_server(run, 1), run_folder.read_server(tmp_path / "1", 0)
    assert server.keys() == {path.replace("model/", "shared/") for path in model if "/body/" in path}
    for path, array in server.items():
        assert np.array_equal(array, model[path.replace("shared/", "model/")])
    for path, rows in clients(tmp_path / "1", 0).items():
        assert (rows == model[f"model/{path}"]).all()


@pytest.mark.parametrize(
    ("before", "after", "kept", "begins"), [("ditto", "local", "personal", "model"), ("fedper", "fedrep", "", "")]
)
def test_each_client_begins_with_its_own_model_where_the_run_has_one(before, after, kept, begins, source, tmp_path):
    run = source(before)
    digests = {quick_run.run(begun(after, f"{run}@2"), tmp_path / str(ranks), ranks) for ranks in (1, 3)}
    assert len(digests) == 1
    own, first = clients(run, 2), clients(tmp_path / "3", 0)
    for path, rows in first.items():
        stored = own["/".join(filter(None, (kept, path.removeprefix(f"{begins}/"))))]
        assert np.array_equal(rows, stored) and (rows != rows[0]).any()


def test_what_the_server_does_not_keep_is_drawn_and_said(source, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        quick_run.run(begun("fedavg", f"{source('fedper')}@2"), tmp_path / "run")
    assert "its server keeps no head/bias, head/weight; the server's is drawn" in caplog.text
    quick_run.run(begun("fedavg", f"{source('fedavg')}@0"), tmp_path / "drawn")
    heads = [run_folder.read_server(tmp_path / name, 0)["model/head/weight"] for name in ("run", "drawn")]
    assert np.array_equal(*heads)


def test_another_partition_is_said(source, tmp_path, caplog):
    for sections, says in (({}, ""), ({"data": {"validation": 0.2}}, "partition"), ({"data": {"limit": 300}}, "data")):
        caplog.clear()
        quick_run.run(begun("fedavg", f"{source('fedavg')}@2", **sections), tmp_path / f"run{says}")
        assert (f"its {says} differs: its models may have been trained on" in caplog.text) == bool(says)


def test_another_normalisation_or_model_of_the_same_sizes_is_said(source, tmp_path, caplog):
    run, net = source("fedavg"), {"name": f"{tmp_path}/net.py:Net", "head": "fc", "check": False}
    quick_run.run(begun("fedavg", f"{run}@2", data={"normalize": "standard"}), tmp_path / "scaled")
    assert "its models were trained with data.normalize = 'fixed' (here 'standard'); they" in caplog.text
    (tmp_path / "net.py").write_text(NET)
    quick_run.run(quick_run.settings(begun("fedavg", ""), model=net), tmp_path / "before")
    (tmp_path / "moved").mkdir()
    for function in ("relu", "tanh"):
        (tmp_path / "moved" / "net.py").write_text(NET.replace("relu", function))
        model = {**net, "name": f"{tmp_path}/moved/net.py:Net", "weights": f"{tmp_path}/before@2", "trainable": ["*"]}
        caplog.clear()
        quick_run.run(quick_run.settings(begun("fedavg", ""), model=model), tmp_path / function)
        assert ("its models were trained with code of model = '" in caplog.text) == (function == "tanh")


def test_a_module_of_ones_own_begins_so_too(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    model = {"name": f"{tmp_path}/net.py:Net", "head": "fc", "check": False}
    raw = quick_run.settings(algorithm={"name": "fedavg"}, training={"rounds": 1}, model=model)
    quick_run.run(raw, tmp_path / "run")
    quick_run.run({**raw, "model": {**model, "weights": f"{tmp_path}/run@1"}}, tmp_path / "next")
    before, after = run_folder.read_server(tmp_path / "run", 1), run_folder.read_server(tmp_path / "next", 0)
    assert all(np.array_equal(before[path], after[path]) for path in before)


def test_a_resumed_run_does_without_it_unless_new_clients_join(source, tmp_path):
    run = shutil.copytree(source("fedavg"), tmp_path / "source")
    digest = quick_run.run(begun("fedrep", f"{run}@2", training={"rounds": 3}), tmp_path / "whole")
    quick_run.run(begun("fedrep", f"{run}@2"), tmp_path / "run")
    unseen = begun("fedrep", f"{run}@2", evaluation={"unseen": 0.3})
    quick_run.run(unseen, tmp_path / "unseen")
    shutil.rmtree(run)
    assert quick_run.resume(tmp_path / "run", ("training.rounds=3",)) == digest
    assert open_run(tmp_path / "run").recorded["code"] == open_run(tmp_path / "whole").recorded["code"]
    with pytest.raises(ConfigError, match="source'@2: there is no such checkpoint; it is no run"):
        quick_run.resume(tmp_path / "unseen", ("training.rounds=3",))


def write_weights(path, value):
    weights = {"fc1.weight": (5, 64), "fc1.bias": (5,), "fc.weight": (10, 5), "fc.bias": (10,)}
    torch.save({name: torch.full(shape, value) for name, shape in weights.items()}, path)


@pytest.fixture
def from_file(tmp_path):
    """A configuration whose module begins with the weights in a file."""
    (tmp_path / "net.py").write_text(NET)
    write_weights(tmp_path / "w.pt", 0.1)
    model = {"name": f"{tmp_path}/net.py:Net", "head": "fc", "check": False, "weights": f"{tmp_path}/w.pt"}
    return quick_run.settings(algorithm={"name": "fedavg"}, training={"rounds": 1}, model=model)


def test_a_run_from_another_file_of_weights_is_another_run(from_file, tmp_path):
    run, config = tmp_path / "one", configuration.parse(from_file)
    quick_run.run(from_file, run)
    digest = quick_run.run({**from_file, "training": {**from_file["training"], "rounds": 2}}, tmp_path / "whole")
    assert find_run_state(run, config).state == "done"
    write_weights(tmp_path / "w.pt", 0.2)
    assert "what model.weights names has changed since" in find_run_state(run, config).problem
    with pytest.raises(CheckpointError, match=r"what model.weights names has changed since"):
        quick_run.resume(run, ("training.rounds=2",))
    quick_run.run(from_file, tmp_path / "two")
    runs = [open_run(tmp_path / name) for name in ("one", "two")]
    assert [key for key, _, _ in differing_settings(*runs)] == ["recorded.code"]
    assert quick_run.resume(run, ("training.rounds=2",), changed_code=True) == digest
    assert open_run(run).recorded["code"] == runs[0].recorded["code"], "it began with the first ones"


def test_a_run_that_has_recorded_no_hash_of_its_weights_goes_on(from_file, tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(outside_code, "sha256", lambda path: "")
        quick_run.run(from_file, tmp_path / "run")
    quick_run.resume(tmp_path / "run", ("training.rounds=2",))
    assert list(open_run(tmp_path / "run").recorded["code"]) == ["model"]


def test_a_run_whose_source_was_made_anew_is_another_run(source, tmp_path):
    run = shutil.copytree(source("fedavg"), tmp_path / "source")
    raw = begun("fedrep", f"{run}@2")
    quick_run.run(raw, tmp_path / "run")
    shutil.rmtree(run)
    quick_run.run(quick_run.settings(training={"rounds": 2}, seed=1), run)
    assert "what model.weights names has" in find_run_state(tmp_path / "run", configuration.parse(raw)).problem


@pytest.mark.parametrize(
    ("before", "sections", "round", "message"),
    [
        ("fedavg", {}, 7, "there is no such checkpoint; it has 0, 1, 2"),
        ("fedavg", {"hidden": 9}, 2, r"is not of this model: body/fc1/\w+ is \[12.*, here \[9"),
        ("ditto", {"clients": 5}, 2, "its 7 clients keep models of their own, and here are 5 clients"),
    ],
)
def test_what_cannot_be_is_refused(before, sections, round, message, source, tmp_path):
    raw = begun("fedavg", f"{source(before)}@{round}")
    for section, key in (("model", "hidden"), ("partition", "clients")):
        raw[section] = {**raw[section], **{name: value for name, value in sections.items() if name == key}}
    with pytest.raises(ConfigError, match=message):
        quick_run.run(raw, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_frozen_parameters_are_refused(source, tmp_path):
    raw = begun("fedavg", f"{source('fedavg')}@2")
    with pytest.raises(ConfigError, match="cannot go with parameters that are not trained, such as body/fc1"):
        quick_run.run({**raw, "model": {**raw["model"], "trainable": ["head.*"]}}, tmp_path / "run")
    frozen = quick_run.settings(training={"rounds": 1}, model={**MODEL, "trainable": ["head.*"]})
    quick_run.run({**frozen, "algorithm": {"name": "local"}}, tmp_path / "frozen")
    with pytest.raises(ConfigError, match="its clients keep no body/fc1/bias, body/fc1/weight; give"):
        quick_run.run(begun("fedavg", f"{tmp_path}/frozen@1"), tmp_path / "run")


def test_files_are_for_modules_and_models_of_a_list_have_one_run(source, tmp_path):
    with pytest.raises(ConfigError, match=r"model.weights = .*net.pt"):
        configuration.parse(begun("fedavg", "net.pt"))
    models = [{**MODEL, "weights": f"{source('local')}@{round}"} for round in (1, 2)]
    with pytest.raises(ConfigError, match="several; give all the same one"):
        quick_run.run({**begun("local", "x@1"), "model": models}, tmp_path / "run")
