"""FedBN: batch norms stay with their clients, everything else is averaged."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import quick_run
from pflmpi import tree
from pflmpi.algorithms.fedbn import FedBN
from pflmpi.config.load import parse
from pflmpi.errors import ConfigError
from pflmpi.experiment.build import prepare
from pflmpi.messages.kinds import Mean
from pflmpi.store import run_folder
from pflmpi.testing.conformance import AlgorithmTests

NET = '''
from torch import nn


class Net(nn.Module):
    """A convolution and a linear layer, each with a batch norm."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.block = nn.Sequential(nn.Flatten(), nn.Linear(144, 9), nn.BatchNorm1d(9, affine=False), nn.ReLU())
        self.fc = nn.Linear(9, num_classes)

    def forward(self, x):
        return self.fc(self.block(self.norm(self.conv(x)).relu()))
'''
NORMS = {
    *("body/norm/weight", "body/norm/bias", "stats/norm/running_mean", "stats/norm/running_var"),
    *("stats/block/2/running_mean", "stats/block/2/running_var"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(NET)
    return {"name": f"{path}:Net", "head": "fc", "check": False}


@pytest.fixture
def task(model):
    raw = quick_run.settings(model=model, algorithm={"name": "fedbn"}, training={"drop_last": True})
    return prepare(parse(raw), torch.device("cpu")).tasks[0]


def paths(values):
    return {path for path, _ in tree.leaves(values)}


def test_scale_shift_and_statistics_stay_and_all_else_travels(task):
    algorithm = FedBN()
    sent, everything = algorithm.uplink(task)["model"], paths(task.like())
    assert isinstance(sent, Mean) and sent.by == "clients", "algorithm 1: 1/K"
    assert paths(algorithm.init_client(task)) == NORMS
    assert paths(sent.like) == paths(algorithm.downlink(task)["model"].like) == everything - NORMS
    assert paths(algorithm.trainings(task)["train"]) == {path for path in everything if "stats" not in path}


def test_an_update_is_sgd_on_the_received_model_with_the_own_batch_norms(task):
    """Against plain PyTorch, by hand; a public implementation finds batch norms by the letters "bn" in names."""
    client = tree.map(lambda leaf: leaf + 0.25, FedBN().init_client(task))
    received = FedBN().init_server(task)["model"]
    x, y = torch.randn((5, 1, 8, 8), generator=torch.Generator().manual_seed(0)), torch.arange(5)
    w = {path: leaf.clone().requires_grad_() for path, leaf in tree.leaves({"m": received, "c": client})}

    def normed(z, name, affine):
        mean, var = (w[f"c/stats/{name}/running_{part}"].detach() for part in ("mean", "var"))
        scale = [w[f"c/body/{name}/{part}"] if affine else None for part in ("weight", "bias")]
        return F.batch_norm(z, mean, var, *scale, training=True)

    z = normed(F.conv2d(x, w["m/body/conv/weight"], w["m/body/conv/bias"]), "norm", True).relu()
    z = normed(F.linear(z.flatten(1), w["m/body/block/1/weight"], w["m/body/block/1/bias"]), "block/2", False).relu()
    F.cross_entropy(F.linear(z, w["m/head/weight"], w["m/head/bias"]), y).backward()

    from pflmpi.learning.client import Batch, ClientData

    data = ClientData({"train": [Batch(x, y)]}, [Batch(x, y)], torch.ones(10), 0.1, 1)
    state, up = FedBN().client_update(task, client, {"model": received}, data)
    for path, leaf in tree.leaves({"m": up["model"], "c": state}):
        expected = w[path].detach() - (0.1 * w[path].grad if w[path].grad is not None else 0)
        torch.testing.assert_close(leaf, expected, rtol=0, atol=1e-6, msg=path)
    assert paths(state) == NORMS
    kept = tree.at(FedBN().train_as_newcomer(task, client, {"model": received}, data), "body/norm/weight")
    assert not torch.equal(kept, tree.at(client, "body/norm/weight")), "a newcomer trains its batch norms"


@pytest.mark.parametrize("bn", ["average", "local"])
def test_training_bn_changes_nothing(model, bn, tmp_path):
    raw = quick_run.settings(model=model, algorithm={"name": "fedbn"}, training={"bn": bn, "rounds": 1})
    quick_run.run(raw, tmp_path / "run")
    server = run_folder.read_server(tmp_path / "run", 1)
    assert not [path for path in server if "stats" in path or "norm" in path]
    moved = run_folder.read_bytes(tmp_path / "run", 1)["up"]
    assert len({*moved[np.nonzero(moved)].tolist()}) == 1


@pytest.mark.parametrize(
    ("settings", "name"), [({"name": "mlp"}, "mlp"), ({"head": "fc", "norm": "group", "check": False}, "Net")]
)
def test_a_model_without_batch_norm_is_refused(model, settings, name, tmp_path):
    raw = quick_run.settings(model={"name": model["name"], **settings}, algorithm={"name": "fedbn"})
    with pytest.raises(ConfigError, match=rf"FedBN keeps the batch norms .* model {name} has none; choose a model"):
        quick_run.run(raw, tmp_path / "run")


@pytest.mark.slow
class TestFedBN(AlgorithmTests):
    """Its conformance on a model with batch norms, which lanes refuse."""

    algorithm = "fedbn"
    sections: ClassVar[dict[str, Any]] = {}
    executors = ("loop",)

    @pytest.fixture(autouse=True)
    def _model(self, model):
        type(self).sections = {"model": model}

    def _name(self) -> str:
        return "fedbn"


def test_the_layers_of_resnet18_that_stay_are_its_twenty_batch_norms():
    raw = quick_run.settings(model={"name": "resnet18"}, algorithm={"name": "fedbn"}, training={"drop_last": True})
    resnet_task = prepare(parse(raw), torch.device("cpu")).tasks[0]
    kept = FedBN().kept(resnet_task)
    assert len(kept) == 2 * 20 + 1 and all("bn" in path or "downsample/1" in path for path in kept[:-1])
    assert kept[-1] == "stats"
