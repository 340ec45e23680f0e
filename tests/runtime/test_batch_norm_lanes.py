"""Batch norm: no lanes, batches of one sample, micro batches."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quick_run
from pflmpi import tree
from pflmpi.errors import ConfigError, RunError
from pflmpi.learning import sgd
from pflmpi.learning.client import Batch, model_loss
from pflmpi.testing.conformance import Runs


class SmallNet(nn.Module):
    """A convolution, batch norm, and batch norm over features."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_channels, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.hidden, self.flat_norm = nn.Linear(16, 6), nn.BatchNorm1d(6)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(x)).relu(), 4).flatten(1)
        return self.fc(self.flat_norm(self.hidden(x)).relu())


class ImageNormed(SmallNet):
    """With batch norm over images alone, which has a variance also of one sample."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(x)).relu(), 4).flatten(1)
        return self.fc(self.hidden(x).relu())


MODEL = {"name": f"{__file__}:SmallNet", "head": "fc"}


@pytest.fixture
def odd_client(tmp_path):
    """Settings of three clients, the last of which has a last batch of one sample."""
    owner, rng = np.repeat(np.arange(3), [40, 40, 41]), np.random.default_rng(0)
    x, y = rng.integers(0, 256, (121, 1, 8, 8), np.uint8), rng.integers(0, 3, 121)
    test = np.concatenate([np.arange(count) < 8 for count in (40, 40, 41)])
    np.savez(tmp_path / "odd.npz", x=x, y=y, client=owner, test=test)
    data = {"name": "odd", "path": str(tmp_path / "odd.npz"), "limit": None}
    raw = {"data": data, "partition": {"name": "writers"}, "model": MODEL, "algorithm": {"name": "fedavg"}}
    return {**raw, "training": {"rounds": 2, "batch_size": 16, "participation": 1.0}}


def test_the_start_warns_of_a_last_batch_of_one_sample(odd_client, tmp_path, caplog):
    with pytest.raises(RunError, match=r"client 2\): .*more than 1 value per channel.* training\.drop_last"):
        quick_run.run(odd_client, tmp_path / "run")
    assert "model SmallNet ends the run" in caplog.text and "the last one of client 2;" in caplog.text
    caplog.clear()
    assert quick_run.command(["evaluate", str(tmp_path / "run")]) == 0
    assert "ends the run" not in caplog.text, "which only tests"


SCORED = {"name": "fedfomo", "received_models": 1, "held_out": 1 / 33}  # one sample is held out, and not trained on


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"drop_last": True}},
        {"training": {"steps": 2}},
        {"runtime": {"client_errors": "skip"}},
        {"algorithm": SCORED, "training": {"batch_size": 32}},
        {"model": {**MODEL, "norm": "group"}},
        {"model": {"name": f"{__file__}:ImageNormed", "head": "fc"}},
    ],
    ids=["drop_last", "steps", "skip", "held out", "group", "images"],
)
def test_nobody_is_warned_of_batches_that_train(changes, odd_client, tmp_path, caplog):
    training = {**odd_client["training"], **changes.get("training", {})}
    quick_run.run(quick_run.settings(odd_client, **{**changes, "training": training}), tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1 + 2
    assert "ends the run" not in caplog.text


class FlatNormed(nn.Module):
    """Without convolutions, for which `auto` chooses a loop on a CPU anyway."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.hidden, self.norm, self.fc = nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.hidden(x.flatten(1))).relu())


@pytest.mark.parametrize("name", ["SmallNet", "FlatNormed"])
def test_auto_leaves_batch_norm_to_the_loop(name, tmp_path):
    model = {**MODEL, "name": f"{__file__}:{name}"}
    experiment = Runs({"algorithm": {"name": "fedavg"}, "model": model}, tmp_path).experiment()
    assert experiment.config.runtime.executor == "loop" and np.unique(experiment.cohort).size == 1


@pytest.mark.parametrize("models", [MODEL, [{"name": "mlp"}, MODEL]], ids=["all", "some"])
def test_lanes_refuse_it(models, tmp_path):
    sections = {"algorithm": {"name": "local"}, "model": models, "runtime": {"executor": "lanes"}}
    remedy = r"set runtime.executor: loop \(of a run that is there in a `pflmpi fork`\), or model.norm: group"
    with pytest.raises(ConfigError, match=rf"with model SmallNet, .*; {remedy}"):
        Runs(sections, tmp_path).experiment()


def test_batch_norm_sees_each_micro_batch_as_a_batch(tmp_path):
    settings = {"algorithm": {"name": "fedavg"}, "model": MODEL, "training": {"batch_size": 10, "micro_batch": 6}}
    task = Runs(settings, tmp_path).experiment().tasks[0]
    x, y = torch.randn(10, *task.architecture.shape), torch.arange(10) % task.num_classes
    model, expected = task.init(), task.init()
    trained = sgd.train(task, model, [Batch(x, y)], model_loss(task), 0.1)
    with torch.no_grad():
        for part in (x[:6], x[6:]):
            task.predict(expected, part, training=True)
    for path, leaf in tree.leaves(tree.part(expected, "stats")):
        assert torch.equal(tree.at(tree.part(trained, "stats"), path), leaf), path
