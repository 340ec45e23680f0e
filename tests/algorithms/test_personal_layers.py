"""FedPer and FedRep with more personal layers than the head: what travels, what stays, what is trained when."""

from typing import Any, ClassVar

import pytest
import torch

import quick_run
import small_task
from pflmpi import tree
from pflmpi.algorithms.fedper import FedPer
from pflmpi.algorithms.fedrep import FedRep
from pflmpi.algorithms.pfedafe import PFedAFE
from pflmpi.errors import ConfigError
from pflmpi.learning.client import Batch, ClientData
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.models import MODELS
from pflmpi.testing import AlgorithmTests

CNN = {"name": "cnn", "first_channels": 2, "second_channels": 3, "kernel": 3, "padding": 1, "hidden": 5}
CONVOLUTIONS = {"body/conv1/bias", "body/conv1/weight", "body/conv2/bias", "body/conv2/weight"}
CONNECTED = {"body/fc1/bias", "body/fc1/weight", "head/bias", "head/weight"}


class TestFedRepOfTwoLayers(AlgorithmTests):
    algorithm: ClassVar[str] = "fedrep"
    options: ClassVar[dict[str, Any]] = {"personal_layers": 2, "head_epochs": 2}
    sections: ClassVar[dict[str, Any]] = {"model": CNN}


class TestPFedAFEOfTwoLayers(AlgorithmTests):
    algorithm: ClassVar[str] = "pfedafe"
    options: ClassVar[dict[str, Any]] = {"personal_layers": 2, "beta_steps": 2}
    sections: ClassVar[dict[str, Any]] = {"model": CNN}


def task():
    fields = {name: value for name, value in CNN.items() if name != "name"}
    return Task(MODELS["cnn"](**fields).bind((1, 8, 8), small_task.CLASSES), TrainingConfig(), 4, 0, (0.5,), (0.5,))


def batch(seed):
    minibatch = small_task.batch(seed)
    return Batch(torch.nn.functional.interpolate(minibatch.x, size=(8, 8)), minibatch.y)


def moved(before, after):
    assert not tree.differences(before, after)
    return {path for path, value in tree.leaves(after) if not torch.equal(value, tree.at(before, path))}


@pytest.mark.parametrize("algorithm", [FedPer(personal_layers=2), FedRep(personal_layers=2)])
def test_the_last_layers_stay_and_the_others_travel(algorithm):
    kept, sent = algorithm.init_client(task()), algorithm.init_server(task())["shared"]
    assert set(dict(tree.leaves(kept))) == CONNECTED
    assert isinstance(sent, dict) and set(dict(tree.leaves(sent))) == CONVOLUTIONS
    assert [*algorithm.uplink(task())] == ["body"] and not tree.differences(algorithm.uplink(task())["body"].like, sent)


@pytest.mark.parametrize(
    "head, body, expected", [([0], [], CONNECTED), ([], [0], CONVOLUTIONS), ([], [], set())], ids=["head", "body", "-"]
)
def test_fedrep_trains_the_personal_layers_first_and_then_those_that_travel(head, body, expected):
    algorithm = FedRep(personal_layers=2)
    kept, received = algorithm.init_client(task()), algorithm.init_server(task())["shared"]
    assert isinstance(received, dict)
    passes = {"head": [batch(seed) for seed in head], "body": [batch(seed) for seed in body]}
    data = ClientData(passes, [batch(0)], torch.full((small_task.CLASSES,), 2.0), 0.5, 1)
    state, up = algorithm.client_update(task(), kept, {"body": received}, data)
    assert moved(kept, state) | moved(received, up["body"]) == expected


def test_pfedafe_mixes_the_convolutions_alone_and_sends_nothing_of_the_two_layers_that_predict():
    algorithm = PFedAFE(personal_layers=2, adaptive=False, beta_init=0.25)
    shared = algorithm.init_server(task())["shared"]
    assert set(dict(tree.leaves(shared))) == CONVOLUTIONS
    own = {**tree.map(lambda leaf: leaf + 4.0, task().init()), "beta": torch.zeros(()), "trained": torch.tensor(True)}
    batches = [batch(0)]
    data = ClientData({"train": batches, "beta": []}, batches, torch.full((small_task.CLASSES,), 2.0), 0.5, 1)
    tested = algorithm.adapt(task(), own, {"body": shared}, data)
    for path, leaf in tree.leaves({name: tested[name] for name in ("body", "head")}):
        expected = tree.at(shared, path) + 1.0 if path in CONVOLUTIONS else tree.at(own, path)
        assert torch.allclose(leaf, expected, atol=1e-6), path
    _, up = algorithm.client_update(task(), own, {"body": shared}, data)
    assert set(dict(tree.leaves(up["body"]))) == CONVOLUTIONS


def test_a_newcomer_of_fedper_trains_the_personal_layers_alone():
    algorithm = FedPer(personal_layers=2)
    kept, received = algorithm.init_client(task()), algorithm.init_server(task())["shared"]
    state = algorithm.train_as_newcomer(task(), kept, {"body": received}, small_task.data([batch(0)]))
    assert moved(kept, state) == CONNECTED


@pytest.mark.parametrize("layers, model, most", [(2, {"name": "mlp", "hidden": 12}, 1), (4, CNN, 3), (9, CNN, 3)])
def test_a_model_without_a_layer_left_to_share_is_refused(layers, model, most, tmp_path):
    raw = quick_run.settings(model=model, algorithm={"name": "fedper", "personal_layers": layers})
    with pytest.raises(ConfigError, match=rf"algorithm.personal_layers = {layers} leaves nothing .* at most {most}$"):
        quick_run.run(raw, tmp_path / "run")
