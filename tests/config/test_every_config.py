"""A small run of every dataset, model and partition: on one rank and on two, with the same bits."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import comparisons
import quick_run
from both_ways import federation_of, run
from pflmpi.algorithms import ALGORITHMS
from pflmpi.data import SOURCES
from pflmpi.data.federation import save
from pflmpi.data.partitions import PARTITIONS
from pflmpi.errors import ConfigError, DataError
from pflmpi.models import MODELS
from pflmpi.models.base import Architecture, Shape
from pflmpi.models.mlp import MLP
from pflmpi.store import run_folder
from raw_files import NUM_CLASSES, random_samples, write_cifar, write_idx, write_leaf

SMALL = {"kernel": 3, "padding": 1}  # for images of 8 x 8
TINY_CNN = {"name": "cnn", "first_channels": 3, "second_channels": 4, "hidden": 8}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data folder with a few samples of every source, in the files' own formats."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the cache is
    folder = tmp_path / "data"
    write_idx(folder / "MNIST" / "raw", "mnist", packed=True)
    write_idx(folder / "FashionMNIST" / "raw", "fashion_mnist", packed=False)
    write_idx(folder / "EMNIST" / "raw", "emnist", packed=False)
    write_cifar(folder, "cifar10", monkeypatch)
    write_cifar(folder, "cifar100", monkeypatch)
    write_leaf(folder / "femnist")
    labels = {
        f"{part}_label": random_samples(seed, n, "mnist")[1] for part, seed, n in (("train", 1, 30), ("test", 2, 10))
    }
    who = {"train_writer": np.arange(30) // 5, "test_writer": np.arange(10) // 5}
    np.savez(folder / "MNIST" / "writers.npz", **labels, **who)
    return folder


@pytest.mark.parametrize("name", list(SOURCES))
@pytest.mark.parametrize("split", ["pooled", "official"])
def test_every_dataset_runs(name, split, root, tmp_path):
    raw = quick_run.settings(
        data={"name": name, "root": str(root), "split": split, **({"limit": 100} if name == "digits" else {})},
        partition={"name": "writers"} if name == "femnist" else {"name": "iid", "clients": 3},
        algorithm={"name": "fedavg"},
        training={"rounds": 1, "participation": 1.0},
    )
    if name == "cifar100" and split == "official":  # its 6 test samples here are of classes that nobody trains on
        with pytest.raises(DataError, match="without test samples"):
            federation_of(raw)
        return
    federation = federation_of(raw)
    _, folder = run(raw, tmp_path)
    assert run_folder.read_server(folder, 1)["model/head/bias"].shape == (NUM_CLASSES[name],)
    if split == "official":
        is_test = federation.dataset.official_test
        assert is_test[np.concatenate(federation.test)].all() and not is_test[np.concatenate(federation.train)].any()


@pytest.mark.parametrize(
    "name, limit, model",
    [
        ("mnist", 300, {"name": "cnn", "hidden": 16}),
        ("fashion_mnist", 300, {"name": "protocnn"}),
        ("cifar10", 120, TINY_CNN),
        ("femnist", 500, {"name": "dnn"}),
    ],
)
def test_real_data_run(name, limit, model, data_root, tmp_path):
    natural = name in ("mnist", "femnist")
    raw = quick_run.settings(
        data={"name": name, "root": str(data_root), "limit": limit},
        partition={"name": "writers", "clients": 4, "min_samples": 3} if natural else {"name": "iid", "clients": 4},
        model=model,
        training={"rounds": 1, "participation": 1.0},
    )
    run(raw, tmp_path)


PARTITION_KEYS: dict[str, list[dict[str, Any]]] = {
    "pathological": [{"classes_per_client": 2}],
    "dirichlet": [{"beta": 0.5, "min_samples": 4}, {"beta": 0.5, "min_samples": 4, "balanced_cap": True}],
    "exdir": [{"classes_per_client": 3, "alpha": 0.5, "min_samples": 4}],
    "nway_kshot": [{"n": 3, "k": 12}],
    "lognormal": [{"classes_per_client": 2, "sigma": 1.0, "min_samples": 4}],
    "iid": [{}, {"balanced": False}],
    "writers": [{"min_samples": 3}],
}


@pytest.mark.parametrize("name, keys", [(name, keys) for name in PARTITIONS for keys in PARTITION_KEYS[name]])
def test_every_partition_runs(name, keys, root, tmp_path):
    raw = quick_run.settings(
        partition={"name": name, "clients": 5, **keys}, training={"rounds": 1, "participation": 1.0}
    )
    if name == "writers":
        raw["data"] = {"name": "mnist", "root": str(root)}
    federation = federation_of(raw)
    assert federation.num_clients == 5
    _, folder = run(raw, tmp_path)
    # FedGMH: the bytes say how many classes each client holds.
    num_classes = (federation.class_counts > 0).sum(1)
    assert run_folder.read_bytes(folder, 1)["up"].tolist() == (num_classes * (4 * 12 + 4)).tolist()


def test_a_saved_partition_gives_the_same_bits(tmp_path):
    by_name = quick_run.settings(training={"rounds": 2})
    save(federation_of(by_name), tmp_path / "who.npz")
    by_path = {**by_name, "partition": {"path": str(tmp_path / "who.npz")}}
    assert federation_of(by_path).digest == federation_of(by_name).digest
    assert run(by_path, tmp_path / "path")[0] == quick_run.run(by_name, tmp_path / "name")
    with pytest.raises(DataError, match="was made for"):
        federation_of({**by_path, "data": {"name": "digits"}})


MODEL_KEYS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": 9},
    "dnn": {"hidden": 9},
    "cnn": {**SMALL, "first_channels": 3, "second_channels": 4, "third_channels": 5, "hidden": 9},
    "protocnn": {**SMALL, "channels": 4},
    "resnet18": {"first_stage_stride": 2, "hidden": 9},
}
WIDTHS = {"dropout_cnn": 128, "lenet": 84, "logistic": 64, "protocnn": 50}  # of models that do not let choose them
QUICK = {"rounds": 1, "participation": 1.0, "steps": 1, "batch_size": 4, "drop_last": True}
FOUR = {"name": "iid", "clients": 4}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs(name, tmp_path):
    raw = quick_run.settings(
        data={"name": "digits", "limit": 80},
        partition={"name": "iid", "clients": 2},
        model={"name": name, **MODEL_KEYS.get(name, {})},
        algorithm={"name": "fedproto"},  # whole models stay with the clients
        training=QUICK,
    )
    _, folder = run(raw, tmp_path)
    (_, arrays), *_ = run_folder.read_clients(folder, 1, np.arange(2)).values()
    assert arrays["model/head/weight"].shape == (2, 10, WIDTHS.get(name, 9))


@dataclass(frozen=True, kw_only=True)
class NormedMLP(MLP):
    def bind(self, shape: Shape, num_classes: int) -> Architecture:
        return comparisons.Normed(name=self.name, shape=shape, num_classes=num_classes, num_features=self.hidden)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
@pytest.mark.parametrize("bn, where", [("average", "server"), ("local", "clients")])
def test_batch_norm_statistics_are_averaged_or_stay(algorithm, bn, where, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS._objects, "normed", NormedMLP)
    raw = quick_run.settings(
        data={"name": "digits", "limit": 40},
        partition={"name": "iid", "clients": 2},
        model={"name": "normed", "hidden": 9},
        algorithm={"name": algorithm},
        training={**QUICK, "bn": bn},
    )
    _, folder = run(raw, tmp_path)
    server = run_folder.read_server(folder, 1)
    rows = {
        path: array
        for _, arrays in run_folder.read_clients(folder, 1, np.arange(2)).values()
        for path, array in arrays.items()
    }
    in_server = [path for path in server if path.endswith("stats/mean")]
    in_clients = [path for path in rows if path.endswith("stats/mean")]
    assert (bool(in_server), bool(in_clients)) == (where == "server", where == "clients")
    for path in in_clients:
        assert rows[path].any(), "the statistics have followed the forward passes"
        assert not np.array_equal(rows[path][0], rows[path][1]), "each client has its own"
    for path in in_server:
        assert server[path].any()


UNLIKE: dict[str, list[dict[str, Any]]] = {
    "fedproto": [{"name": "protocnn", **SMALL, "channels": channels} for channels in (18, 20, 22)],
    "fedgmh": [{"name": "mlp", "hidden": 9}, {"name": "cnn", **SMALL, "first_channels": 3, "hidden": 9}],
    "local": [{"name": "mlp", "hidden": 9}, {"name": "mlp", "hidden": 4}],
    "fedgh": [{"name": "protocnn", **SMALL, "channels": channels} for channels in (3, 4)],
    "lgfedavg": [{"name": "protocnn", **SMALL, "channels": channels} for channels in (3, 4)],
}


@pytest.mark.parametrize("algorithm", UNLIKE)
def test_unlike_models_are_cycled_over_the_clients(algorithm, tmp_path):
    models = UNLIKE[algorithm]
    raw = quick_run.settings(
        model=models, algorithm={"name": algorithm}, partition=FOUR, training={"rounds": 2, "participation": 0.7}
    )
    _, folder = run(raw, tmp_path)
    cohorts = run_folder.read_clients(folder, 2, np.arange(4))
    ids = [clients.tolist() for clients, _ in cohorts.values()]
    assert ids == [[client for client in range(4) if client % len(models) == which] for which in range(len(models))]
    shapes = [{path: array.shape[1:] for path, array in arrays.items()} for _, arrays in cohorts.values()]
    assert len({str(sorted(shape.items())) for shape in shapes}) == len(models), "the bodies differ"
    if algorithm == "fedproto":
        assert [shape["model/body/conv2/weight"][0] for shape in shapes] == [18, 20, 22]


def test_the_list_of_models_in_the_docs_is_for_all_algorithms_that_allow_one(tmp_path):
    example = re.search(r"`(model: \[.*\])`", (Path(__file__).parents[2] / "docs/configuration.md").read_text())
    assert example is not None
    models = yaml.safe_load(example[1])["model"]
    allowing = [name for name in ALGORITHMS if ALGORITHMS[name].unlike_models]
    assert len(allowing) == 7
    for name in allowing:
        training = {"rounds": 1, "steps": 1, "epochs": 1}
        raw = quick_run.settings(model=models, algorithm={"name": name}, partition=FOUR, training=training)
        quick_run.run(raw, tmp_path / name)


def test_a_class_of_ones_own_is_told_how_it_allows_unlike_models(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from pflmpi.algorithms.fedper import FedPer\n\n\nclass Mine(FedPer):\n    pass\n"
    )
    models = [{"name": "mlp", "hidden": 9}, {"name": "cnn", **SMALL, "hidden": 9}]
    raw = quick_run.settings(model=models, algorithm={"name": f"{tmp_path}/mine.py:Mine"}, partition=FOUR)
    with pytest.raises(ConfigError, match=r"unlike_models = True .* has 2: mlp, cnn$"):
        quick_run.run(raw, tmp_path / "run")
