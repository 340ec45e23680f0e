"""`model.cache_features`: the features of a frozen body computed once, and everything else as without."""

import numpy as np
import pytest
import torch

import quick_run
from comparisons import state_of
from pflmpi.cli import main
from pflmpi.config.load import parse
from pflmpi.errors import ConfigError
from pflmpi.experiment import build
from pflmpi.forecast.bytes import pool_bytes
from pflmpi.learning.task import HOST
from pflmpi.models.conv_net import ConvNet
from pflmpi.runtime.executors.batches import Pool
from pflmpi.testing import conformance
from pflmpi.testing.conformance import Runs

CNN = {"name": "cnn", "kernel": 3, "padding": 1, "first_channels": 2, "second_channels": 3, "hidden": 12}
FROZEN = {**CNN, "trainable": ["head.*"]}
CACHED = {**FROZEN, "cache_features": True}
NET = '''
import torch
from torch import nn


class Net(nn.Module):
    """A frozen layer, in evaluation or as it is, with dropout or batch norm."""

    def __init__(self, num_classes, p: float = 0.0, fixed: bool = True, normed: bool = False, turned: bool = False):
        super().__init__()
        norm = nn.BatchNorm1d(9) if normed else nn.Identity()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), norm, nn.ReLU(), nn.Dropout(p)).requires_grad_(False)
        self.fc = nn.Linear(9, num_classes)
        self.fixed, self.turned = fixed, turned

    def train(self, mode=True):
        super().train(mode)
        if self.fixed:
            self.body.eval()
        return self

    def forward(self, x):
        z = self.body(x)
        return self.fc(-z if self.turned and self.training else z)


class Attending(nn.Module):
    """A frozen layer of a transformer, whose attention PyTorch computes by another kernel in evaluation."""

    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).requires_grad_(False)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.fc(self.body(x.flatten(0, 1)).flatten(1))


class Projecting(Net):
    """A frozen body with a constant that follows from the seed."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.register_buffer("projection", torch.randn(64, 64) / 8)

    def forward(self, x):
        return super().forward(torch.cos(x.flatten(1) @ self.projection))
'''


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return {"name": f"{tmp_path}/net.py:Net", "head": "fc", "check": False, "cache_features": True}


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedgmh"])
def test_the_bits_are_those_without_it(executor, algorithm, tmp_path):
    """Of full batches, client by client: fewer than about 8 samples, or lanes, are computed by another kernel."""
    sections = {
        "algorithm": {"name": algorithm},
        "training": {"drop_last": True, "epochs": 2, "momentum": 0.5},
        "runtime": {"executor": executor, "lanes": 2},
    }
    for name, model in (("without", FROZEN), ("with", CACHED)):
        quick_run.run(quick_run.settings(sections, model=model), tmp_path / name)
    without, cached = (state_of(tmp_path / name) for name in ("without", "with"))
    assert without.keys() == cached.keys() and without
    for path, array in without.items():
        if (algorithm, executor) == ("fedavg", "loop"):
            assert np.array_equal(array, cached[path]), path
        else:  # class means are over all of a client's samples, in batches of other sizes
            np.testing.assert_allclose(array, cached[path], rtol=0, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_the_body_is_called_once_for_each_sample(executor, tmp_path, monkeypatch):
    calls, features = [], ConvNet.features

    def counted(self, params, x, training):
        calls.append(x.shape[0])
        return features(self, params, x, training)

    monkeypatch.setattr(ConvNet, "features", counted)
    numbers = {}
    for name, model in (("cached", CACHED), ("without", FROZEN)):
        for rounds in (1, 3):
            training, runtime = {"rounds": rounds}, {"executor": executor, "lanes": 2}
            raw = quick_run.settings(algorithm={"name": "fedavg"}, model=model, training=training, runtime=runtime)
            quick_run.run(raw, tmp_path / f"{name}{rounds}")
            numbers[name, rounds] = len(calls)
            assert name == "without" or calls.count(32) == -(-400 // 32)
            calls.clear()
    assert numbers["cached", 1] == numbers["cached", 3] and numbers["without", 1] < numbers["without", 3]


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedproto"])
def test_bits_on_any_ranks_and_after_a_continuation(executor, algorithm, tmp_path):
    runs = Runs({"algorithm": {"name": algorithm}, "model": CACHED}, tmp_path)
    for ranks in (2, 3):
        conformance.same_bits(runs, executor, ranks)
    conformance.exact_continuation(runs, "latest", executor)


def test_a_rank_has_the_features_of_its_own_clients_alone():
    raw = quick_run.settings(algorithm={"name": "local"}, model=CACHED)
    experiment = build.prepare(parse(raw), HOST)
    ready = [build.setup(experiment, 2, 2, rank) for rank in range(2)]
    pools = [one.executor.pool for one in ready]
    assert [pool.images.shape[1:] for pool in pools] == [(12,), (12,)]
    assert all(len(pool.images) < 400 for pool in pools) and sum(len(pool.images) for pool in pools) <= 401
    assert [pool_bytes(one, rank) for rank, one in enumerate(ready)] == [56 * len(pool.images) for pool in pools]
    every = Pool.of_features(experiment.federation.dataset, experiment.tasks[0])
    for pool in pools:
        assert torch.equal(pool.images[pool.places(pool.held)], every.images[pool.held])


def test_features_do_not_depend_on_the_samples_of_a_rank(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 6)), rng.integers(0, 2, 200)  # rows of 24 bytes, aligned by turns
    np.savez(tmp_path / "my.npz", x=x, y=y)
    raw = quick_run.settings(algorithm={"name": "local"}, partition={"name": "iid", "clients": 4})
    raw["data"], raw["model"] = (
        {"path": str(tmp_path / "my.npz")},
        {"name": "mlp", "hidden": 8, "trainable": ["head.*"]},
    )
    experiment = build.prepare(parse(raw), HOST)
    dataset, task = experiment.federation.dataset, experiment.tasks[0]
    features = Pool.of_features(dataset, task).images
    for samples in (np.arange(1, 200), np.flatnonzero(rng.random(200) < 0.4), np.array([7]), np.array([0, 32, 64, 5])):
        assert torch.equal(Pool.of_features(dataset, task, samples).images, features[samples])


@pytest.mark.parametrize(
    "settings",
    [{"p": 0.5}, {"normed": True}, {}, {"p": 0.0, "fixed": False}, {"name": "Attending"}, {"name": "Projecting"}],
)
def test_what_a_frozen_module_does_in_evaluation_alone_is_permitted(settings, net, tmp_path, capfd):
    name = net["name"].replace(":Net", f":{settings.get('name', 'Net')}")
    raw = quick_run.settings(algorithm={"name": "fedavg"}, model={**net, **settings, "name": name})
    quick_run.run(raw, tmp_path / "run")
    assert quick_run.resume(tmp_path / "run", ("training.rounds=4",), 2)
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "--client", "1", "-o", str(tmp_path / "one.pt")]) == 0
    capfd.readouterr()


@pytest.mark.parametrize(
    ("changes", "sections", "why"),
    [
        ({"p": 0.5, "fixed": False}, {}, "dropout, or what else model Net does in training alone, changes them"),
        ({"turned": True}, {}, "dropout, or what else model Net does in training alone, changes them"),
        ({"normed": True, "fixed": False}, {}, "batch norm of model Net follows the batches; keep it in evaluation"),
        ({"trainable": ["*"]}, {}, r"body.1.bias of model Net is trained, and only its head may be; say so by"),
        ({}, {"data": {"transform": ["horizontal_flip"]}}, "data.transform changes samples in each step; leave it out"),
    ],
)
def test_what_would_change_features_is_refused(changes, sections, why, net, tmp_path):
    raw = quick_run.settings(sections, algorithm={"name": "fedavg"}, model={**net, **changes})
    with pytest.raises(ConfigError, match=rf"^model.cache_features = true, but {why}"):
        quick_run.run(raw, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({**CNN, "cache_features": True}, "conv1.bias of model cnn is trained"),
        ({"name": "logistic", "cache_features": True}, "model logistic has no frozen body; leave the key out"),
        ([CACHED, {**CACHED, "hidden": 10}], "there are 2 models, and features are kept for one"),
    ],
)
def test_models_without_one_frozen_body_are_refused(model, why, tmp_path):
    raw = quick_run.settings(algorithm={"name": "local"}, model=model)
    with pytest.raises(ConfigError, match=rf"^model.cache_features = true, but {why}"):
        quick_run.run(raw, tmp_path / "run")
