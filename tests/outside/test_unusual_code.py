"""Own code that does what no algorithm, module or partition should: a clear refusal, or the same bits all the same."""

import re
import subprocess
import sys

import numpy as np
import pytest
import yaml

import own_code
import processes
import quick_run
from every_algorithm import ON_ANY_MODEL
from pflmpi.cli import main
from pflmpi.config import load as configuration
from pflmpi.config import yaml_file
from pflmpi.data.federation import save
from pflmpi.errors import ConfigError, DataError, RunError, UserError
from pflmpi.experiment.build import load_federation
from pflmpi.experiment.stored_config import stored_config
from pflmpi.store import run_folder
from project import ROOT

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.first = nn.Linear(64, 6)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x):
        return self.fc(torch.relu(self.first(x.flatten(1))))


class Called(Net):
    def __init__(self, num_classes, head: int, name="net", kind="plain", norm=False, weights: float = 1.0):
        super().__init__(num_classes)
        assert head == 6 and name == "ours" and kind == "plain"
        self.norm, self.weight = nn.LayerNorm(6) if norm else nn.Identity(), weights

    def forward(self, x):
        return self.fc(self.norm(torch.relu(self.first(x.flatten(1)))) * self.weight)
"""
ALGORITHMS_OF_ONES_OWN = """
import sys
from dataclasses import dataclass

from pflmpi.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Named(FedAvg):
    name: str = "mine"


@dataclass(frozen=True, kw_only=True)
class Pathed(FedAvg):
    path: str = "mine"


@dataclass(frozen=True, kw_only=True)
class Leaves(FedAvg):
    def server_update(self, task, server, up, round):
        sys.exit(0)


@dataclass(frozen=True, kw_only=True)
class Unfinite(FedAvg):
    def server_update(self, task, server, up, round):
        new = super().server_update(task, server, up, round)
        new["model"]["head"]["bias"] = new["model"]["head"]["bias"] / 0
        return new
"""
SOURCE = """
from dataclasses import dataclass
from pathlib import Path

from pflmpi.data.sources.base import OwnSource


@dataclass(frozen=True, kw_only=True)
class Files(OwnSource):
    folder: Path = Path("x")

    def read(self, root):
        raise NotImplementedError
"""
PARTITIONS = """
import sys

import numpy as np


def drawn(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    return [np.sort(part) for part in np.array_split(np.random.permutation(len(labels)), clients)]


def fewer(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    return np.array_split(np.arange(len(labels)), clients - 2)


def leaves(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    sys.exit(0)


def pathed(labels: np.ndarray, clients: int, rng: np.random.Generator, *, path: str = "") -> list[np.ndarray]:
    return np.array_split(np.arange(len(labels)), clients)
"""


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    for name, text in (("nets", NETS), ("own", ALGORITHMS_OF_ONES_OWN), ("parts", PARTITIONS)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)


def settings(algorithm="", partition="", **sections):
    if partition:
        sections["partition"] = {"name": f"parts.py:{partition}", "clients": 5}
    sections["algorithm"] = {"name": f"own.py:{algorithm}" if algorithm else "fedavg"}
    return quick_run.settings(**sections)


def test_sys_exit_in_own_code_is_an_error(tmp_path):
    with pytest.raises(RunError, match=r"Leaves.server_update \(round 1\): SystemExit: 0; at .*own.py"):
        quick_run.run(settings(algorithm="Leaves"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"parts.py:\d+, in leaves: SystemExit: 0"):
        quick_run.run(settings(partition="leaves"), tmp_path / "run2")


def test_a_server_that_loses_its_numbers_is_named(tmp_path):
    expected = r"Unfinite.server_update \(round 1\) returned values in model/head/bias that are not finite"
    with pytest.raises(RunError, match=expected):
        quick_run.run(settings(algorithm="Unfinite", training={"rounds": 1}), tmp_path / "run")


def test_a_field_has_no_name_of_a_key(tmp_path):
    with pytest.raises(ConfigError, match=r"own.py: Named.name is a key already"):
        configuration.parse(settings(algorithm="Named"))
    with pytest.raises(ConfigError, match=r"pathed: partition.path is a key already; rename the parameter"):
        configuration.parse(settings(partition="pathed"))


def test_a_dataset_has_no_field_that_a_configuration_cannot_hold(tmp_path):
    (tmp_path / "source.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=r"source.py: Files.folder = .* is a PosixPath, which data.folder cannot be"):
        configuration.parse(settings(data={"name": "source.py:Files"}))


def test_the_configuration_of_a_run_is_one_for_another(tmp_path):
    first = quick_run.run(settings(), tmp_path / "first")
    again = configuration.load(tmp_path / "first" / "config.yaml").resolved()
    assert quick_run.run(again, tmp_path / "again") == first


def test_an_algorithm_may_have_a_field_called_path(tmp_path):
    digest = quick_run.run(settings(algorithm="Pathed"), tmp_path / "whole")
    quick_run.run(settings(algorithm="Pathed", training={"rounds": 1}), tmp_path / "run")
    assert quick_run.resume(tmp_path / "run", ("training.rounds=3",)) == digest


def test_a_partition_may_draw_from_numpy_and_gives_all_its_clients(tmp_path):
    digest = quick_run.run(settings(partition="drawn"), tmp_path / "whole")
    np.random.rand()
    quick_run.run(settings(partition="drawn", training={"rounds": 1}), tmp_path / "run", 2)
    assert quick_run.resume(tmp_path / "run", ("training.rounds=3",)) == digest
    with pytest.raises(DataError, match=r"parts.py:fewer' returned 3 clients; partition.clients = 5"):
        quick_run.run(settings(partition="fewer"), tmp_path / "fewer")


def test_a_saved_partition_is_found_from_anywhere_and_may_move(tmp_path, monkeypatch):
    named = settings(training={"rounds": 1})
    (tmp_path / "setup").mkdir()
    save(load_federation(configuration.parse(named)), tmp_path / "setup" / "who.npz")
    config = tmp_path / "setup" / "config.yaml"
    config.write_text(yaml_file.dump({**named, "partition": {"path": "who.npz"}}))
    digest = quick_run.run(settings(), tmp_path / "whole")
    raw = configuration.load(config).resolved()
    assert raw["partition"] == {"path": str(tmp_path / "setup" / "who.npz")}
    quick_run.run(raw, tmp_path / "run")
    monkeypatch.chdir("/")
    assert quick_run.resume(tmp_path / "run", ("training.rounds=2",))
    (tmp_path / "setup" / "who.npz").rename(tmp_path / "moved.npz")
    assert main(["resume", str(tmp_path / "run"), "-s", "training.rounds=3"]) == 2
    moved = ("training.rounds=3", f"partition.path={tmp_path}/moved.npz")
    assert quick_run.resume(tmp_path / "run", moved) == digest
    assert stored_config(tmp_path / "run", ()).partition.path == f"{tmp_path}/moved.npz"


@pytest.mark.parametrize("name", ON_ANY_MODEL)
def test_a_model_without_a_body_runs_or_is_refused_before_the_start(name, tmp_path):
    training = {"participation": 1.0, "rounds": 1}
    raw = quick_run.settings(model={"name": "logistic"}, algorithm={"name": name}, training=training)
    if name in ("fedper", "fedrep", "fedbabu", "fedpac", "pfedafe", "fedfcd", "moon"):
        with pytest.raises(UserError, match=r"with model logistic|model logistic has none"):
            quick_run.run(raw, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    else:
        quick_run.run(raw, tmp_path / "run")


CALLED = {"name": "nets.py:Called", "head": "fc", "arguments": {"head": 6, "name": "ours"}}


def test_arguments_that_are_called_as_keys_reach_the_module(tmp_path):
    normed = {**CALLED, "arguments": {**CALLED["arguments"], "norm": True}}
    runs = {"plain": CALLED, "normed": normed, "ours": {**normed, "norm": "group"}}
    digests = {name: quick_run.run(settings(model=model), tmp_path / name) for name, model in runs.items()}
    assert digests["plain"] != digests["normed"] == digests["ours"]  # there is no batch norm to replace
    assert quick_run.resume(tmp_path / "normed") == digests["normed"]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"norm": "group"}, r"model.norm may be .* argument 'norm' of Called; .*model.arguments: \{norm: ...\}"),
        ({"weights": 2.0}, r"model.weights may be .*model.arguments: \{weights: ...\}"),
        ({"kind": "odd"}, r"model.kind is no key, .* give the argument of Called as model.arguments: \{kind: ...\}"),
        ({"arguments": {}}, r"model.head may be .*model.arguments: \{head: ...\}"),
        ({"arguments": {"head": "fc"}}, r"model.arguments.head = 'fc': must be a int"),
        ({"arguments": {"head": 6, "width": 3}}, r"model.arguments.width is no argument of Called .* known: head"),
    ],
)
def test_a_key_that_could_mean_two_things_is_refused(changes, expected):
    with pytest.raises(ConfigError, match=expected):
        configuration.parse(settings(model={**CALLED, **changes}))


PAGE = (ROOT / "docs" / "new-algorithm.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder outside the repository with the file of the page, and a configuration that names it."""
    path = tmp_path_factory.mktemp("new user")
    (path / "fedmine.py").write_text(blocks("python")[0])
    raw = quick_run.settings(yaml.safe_load(blocks("yaml")[0]))
    (path / "mine.yaml").write_text(yaml.safe_dump(raw))
    return path


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_algorithm_of_the_page_is_known_to_the_commands(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["list", "fedmine.py:FedMine"]) == 0
    shown = capsys.readouterr().out
    assert "pull" in shown and "weight of the distance" in shown.replace("\n", " ").replace("│", "")
    assert main(["plan", "mine.yaml", "--ranks", "2"]) == 0


def test_the_tests_of_the_page_pass(folder):
    (folder / "test_fedmine.py").write_text(blocks("python")[1])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "bytes or lanes_agree",
            "test_fedmine.py",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=processes.PATIENCE,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_algorithm_of_the_page_that_adapts_does(folder, tmp_path):
    (tmp_path / "fedbabu.py").write_text(blocks("python")[3])
    raw = quick_run.settings(algorithm={"name": f"{tmp_path}/fedbabu.py:FedBABU"}, training={"rounds": 1})
    scores = []
    for name in ("FedBABU", "FedPer"):
        algorithm = {"name": raw["algorithm"]["name"].replace("FedBABU", name)}
        quick_run.run({**raw, "algorithm": algorithm}, tmp_path / name)
        scores.append(run_folder.read_metrics(tmp_path / name, 1)["correct"].sum())
    assert scores[0] > scores[1]


@pytest.mark.slow
def test_all_launchers_give_its_bits_and_continue_them(folder, tmp_path):
    config = own_code.write(tmp_path / "code", training={"rounds": 2})
    for name, path in (("page", folder / "mine.yaml"), ("own", config)):
        digests = []
        for way, ranks in (("alone", 1), ("mpi", 3), ("torchrun", 2)):
            run = tmp_path / f"{name}-{way}"
            words = [*processes.start_way(way, ranks), "run", str(path), "--out", str(run), "--quiet"]
            words += ["-s", "training.rounds=1"] if way == "mpi" else []
            done = processes.call([*words, *(["--ranks", "1"] if way == "alone" else [])], cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            if way == "mpi":
                rounds = run_folder.rounds(tmp_path / f"{name}-alone")[-1]
                words = [*processes.PFLMPI, "resume", str(run), "--ranks", "2", "-s", f"training.rounds={rounds}"]
                done = processes.call(words, cwd="/")
                assert done.returncode == 0, done.stderr
            digests.append(run_folder.digest(run, run_folder.rounds(run)[-1]))
        assert len(set(digests)) == 1, (name, digests)
