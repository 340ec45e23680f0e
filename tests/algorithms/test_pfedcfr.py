"""pFedCFR: the cross-fusion rule layer by layer, the client's objective, which layers are which, what travels."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import numpy_network
import small_task
from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.distances import inner_products, squared_distances
from pflmpi.algorithms.fedprox import FedProx
from pflmpi.algorithms.pfedcfr import PFedCFR
from pflmpi.errors import ConfigError
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.messages.kinds import Mean
from pflmpi.models import MODELS
from pflmpi.testing import AlgorithmTests
from pflmpi.tree import Tree

LR = 0.1
FEATURE, DECISION = ["body/fc1/weight", "body/fc1/bias"], ["head/weight", "head/bias"]


def models(count):
    """Models whose layers are unlike each other in how far apart they are."""
    generator = torch.Generator().manual_seed(count)
    rows = tree.stack(
        [tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator), small_task.task().init())] * count
    )
    return tree.map(lambda leaf: leaf + 0.5 * torch.randn(leaf.shape, generator=generator), rows)


def fuse(layer, alpha, sigma):
    """Equation 10, client by client; `layer` is one vector for each client."""
    fused = []
    for n, w_n in enumerate(layer):
        new = w_n.copy()
        for m, w_m in enumerate(layer):
            if m != n:
                zeta = alpha * np.exp(-((w_n - w_m) ** 2).sum() / sigma) / sigma
                new += zeta * (w_m - w_n)
        fused.append(new)
    return fused


def vectors(rows, paths):
    """The tensors of a layer of each client, as one vector."""
    return list(np.concatenate([tree.at(rows, path).flatten(1).double().numpy() for path in paths], 1))


def bound(name, shape=(3, 32, 32), bn="average", **fields):
    architecture = MODELS[name](**fields).bind(shape, 10)
    return Task(architecture, TrainingConfig(bn=bn), 3, 0, (0.5,), (0.5,))


def part_of(model, like):
    """The leaves of a model that a template has."""
    return tree.unflatten({path: tree.at(model, path) for path, _ in tree.leaves(like)})


@pytest.mark.parametrize(
    "fields, layers",
    [
        ({}, [FEATURE]),
        ({"layer_unit": "tensor"}, [[path] for path in FEATURE]),
        ({"layer_unit": "tensor", "num_personal_layers": 1}, [FEATURE[:1]]),
        ({"num_personal_layers": 2}, [FEATURE, DECISION]),
        ({"num_personal_layers": 0}, []),
        ({"rules": ["mean", "attention"], "thresholds": [1]}, [DECISION]),
    ],
)
def test_personal_layers_are_fused_by_their_own_distance_and_the_others_averaged(fields, layers):
    task, up = small_task.task(clients=5), models(3)
    algorithm = PFedCFR(alpha=1.5, sigma=4.0, **fields)
    sent = {name: part_of(up, kind.like) for name, kind in algorithm.uplink(task).items()}
    now = Round(1, np.array([0, 2, 4]), 0)
    if layers:
        fused = algorithm.answer(task, {}, {"personal": sent["personal"]}, now)["personal"]
        for paths in layers:
            np.testing.assert_allclose(vectors(fused, paths), fuse(vectors(up, paths), 1.5, 4.0), atol=1e-6)
    common = {*FEATURE, *DECISION} - {path for paths in layers for path in paths}
    if common:
        kind = algorithm.uplink(task)["decision"]
        assert isinstance(kind, Mean) and kind.by == "clients" and dict(tree.leaves(kind.like)).keys() == common
        mean = tree.map(lambda leaf: leaf.double().mean(0).float(), sent["decision"])
        new = algorithm.server_update(task, algorithm.init_server(task), {**sent, "decision": mean}, now)
        assert not tree.differences(new, {"decision": kind.like}) and new["decision"] is mean


def test_with_a_tiny_alpha_every_client_keeps_its_own_feature_layers():
    task, up = small_task.task(clients=3), models(3)
    algorithm = PFedCFR(alpha=1e-12)
    sent = {"personal": part_of(up, algorithm.uplink(task)["personal"].like)}
    new = algorithm.answer(task, {}, sent, Round(1, np.arange(3), 0))["personal"]
    assert all(torch.equal(tree.at(new, path), tree.at(up, path)) for path in FEATURE)


def test_distances_of_models_that_are_near_each_other_do_not_cancel():
    # Differences of 1e-4 in weights of 1000: 4e-5 in all, of norms of 4e9, which float64 keeps to 1e-6.
    rng = np.random.default_rng(0)
    w = (rng.normal(1000, 1, 4000) + rng.integers(-3, 4, (5, 4000)) * 2.0**-13).astype(np.float32)
    expected = ((w[:, None].astype(np.float64) - w) ** 2).sum(-1)
    seen: Tree = {"w": inner_products(torch.from_numpy(w), from_first=True)}
    distances = squared_distances(seen)
    np.testing.assert_allclose(distances, expected, rtol=1e-9)
    columns = torch.tensor([3, 0])
    assert torch.equal(squared_distances(seen, columns), distances[:, columns])


def test_the_reply_has_the_common_decision_layers():
    task, algorithm = small_task.task(clients=3), PFedCFR(alpha=1.0, sigma=4.0)
    server: Tree = {"decision": part_of(tree.row(models(2), 1), algorithm.uplink(task)["decision"].like)}
    down = algorithm.publish(task, server, np.array([2, 0]))
    assert down.keys() == {"decision"} and dict(tree.leaves(down["decision"])).keys() == {*DECISION}
    for path in DECISION:
        assert torch.equal(tree.at(down["decision"], path), tree.at(models(2), path)[1])


def test_the_first_reply_is_every_clients_own_initial_feature_layers():
    task, algorithm = small_task.task(clients=3, init="per_client"), PFedCFR()
    down = algorithm.publish(task, algorithm.init_server(task), np.arange(3))
    for client in range(3):
        its = task.of_client(client)
        first = algorithm.init_received(its)["personal"]
        assert torch.equal(first["body"]["fc1"]["weight"], its.init()["body"]["fc1"]["weight"])
    assert torch.equal(down["decision"]["head"]["weight"], task.init()["head"]["weight"])


def received(algorithm, task):
    rows = tree.row(models(2), 0)
    paths = {"personal": FEATURE, "decision": DECISION}
    kinds = algorithm.downlink(task)
    return {name: tree.unflatten({path: tree.at(rows, path) for path in paths[name]}) for name in kinds}


@pytest.mark.parametrize("start", ["fused", "local"])
def test_the_client_is_pulled_to_what_it_received_by_two_terms(start):
    # Also the known defect of FedAMP in public code: a proximal term without a gradient.
    task, batches = small_task.task(), [small_task.batch(0), small_task.batch(1)]
    algorithm = PFedCFR(alpha=2.0, sigma=10.0, prox_weight=3.0, decision_prox_weight=0.7, start=start)
    down = received(algorithm, task)
    anchor = small_task.to_numpy({**down["personal"], **down["decision"]})
    w = anchor if start == "fused" else small_task.to_numpy(task.init())
    for batch in batches:
        gradient = numpy_network.gradients(w, *small_task.flat(batch))
        pull = {"W1": 3.0 / 2.0, "b1": 3.0 / 2.0, "W2": 0.7, "b2": 0.7}  # lambda / alpha, mu
        w = {k: w[k] - LR * (gradient[k] + pull[k] * (w[k] - anchor[k])) for k in w}
    state, up = algorithm.client_update(task, {"model": task.init()}, down, small_task.data(batches, LR))
    small_task.assert_close(state["model"], w)
    sent = [leaf for part in up.values() for leaf in tree.leaves(part)]
    assert sorted(path for path, _ in sent) == sorted([*FEATURE, *DECISION])
    assert all(torch.equal(leaf, tree.at(state["model"], path)) for path, leaf in sent)


def test_without_personal_layers_the_client_is_that_of_fedprox():
    task, data = small_task.task(), small_task.data([small_task.batch(0), small_task.batch(1)])
    algorithm = PFedCFR(num_personal_layers=0, decision_prox_weight=0.4)
    model = tree.row(models(2), 0)
    _, pfedcfr_up = algorithm.client_update(task, {"model": task.init()}, {"decision": model}, data)
    _, fedprox_up = FedProx(prox_weight=0.4).client_update(task, {}, {"model": model}, data)
    assert all(
        torch.equal(leaf, tree.at(fedprox_up["model"], path)) for path, leaf in tree.leaves(pfedcfr_up["decision"])
    )
    assert list(algorithm.downlink(task)) == ["decision"]


def test_the_model_after_local_training_predicts():
    task, batch = small_task.task(), small_task.batch(0)
    model = tree.row(models(2), 1)
    assert torch.equal(PFedCFR().predict(task, {"model": model}, {}, batch.x), task.predict(model, batch.x))
    assert PFedCFR.predicts_with == ()


def test_batch_norm_statistics_stay_with_the_client():
    task = bound("resnet18", (1, 8, 8), bn="average")
    algorithm = PFedCFR()
    messages = [*algorithm.uplink(task).values(), *algorithm.downlink(task).values()]
    assert not any("stats" in kind.like for kind in messages)
    client = algorithm.init_client(task)
    down = {
        name: tree.map(lambda leaf: torch.ones(leaf.shape), kind.like)
        for name, kind in algorithm.downlink(task).items()
    }
    batch = small_task.Batch(torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1]))
    data = small_task.ClientData({"train": [batch]}, [batch], torch.tensor([1.0, 1.0] + [0.0] * 8), LR, 1)
    state, up = algorithm.client_update(task, client, down, data)
    assert sorted({part for sent in up.values() for part in sent}) == ["body", "head"]
    assert not torch.equal(
        tree.at(state["model"], "stats/bn1/running_mean"), tree.at(client["model"], "stats/bn1/running_mean")
    )


@pytest.mark.parametrize(
    "model, fields, expected",
    [
        ({"name": "dnn"}, {}, (1, 2)),
        ({"name": "cnn"}, {}, (2, 4)),
        ({"name": "cnn"}, {"layer_unit": "tensor"}, (4, 8)),
        ({"name": "resnet18"}, {}, (40, 41)),
        ({"name": "resnet18", "hidden": 30}, {}, (40, 42)),
        ({"name": "resnet18", "hidden": 30}, {"layer_unit": "tensor"}, (60, 64)),
        ({"name": "resnet18", "hidden": 30}, {"layer_unit": "tensor", "num_personal_layers": 56}, (56, 64)),
    ],
)
def test_the_threshold_is_by_function_unless_it_is_given(model, fields, expected):
    personal, decision = PFedCFR(**fields).split(bound(**model))
    assert (len(personal), len(personal) + len(decision)) == expected


def test_a_tensor_as_a_layer_has_the_weight_before_the_bias():
    personal, decision = PFedCFR(layer_unit="tensor", num_personal_layers=3).split(bound("cnn"))
    assert personal == [("body/conv1/weight",), ("body/conv1/bias",), ("body/conv2/weight",)]
    assert decision[0] == ("body/conv2/bias",) and decision[-1] == ("head/bias",)


@pytest.mark.parametrize(
    "fields", [{}, {"num_personal_layers": 0}, {"num_personal_layers": 4}, {"layer_unit": "tensor"}]
)
def test_every_layer_travels_once_each_way(fields):
    task, algorithm = bound("cnn"), PFedCFR(**fields)
    assert sum(kind.client_bytes(2) for kind in algorithm.uplink(task).values()) == 4 * 878_538
    assert sum(kind.client_bytes(2) for kind in algorithm.downlink(task).values()) == 4 * 878_538


def test_the_feature_layers_are_the_own_ones_and_the_decision_layers_the_shared_ones():
    down = PFedCFR().downlink(bound("cnn"))
    convolutions = (3 * 25 * 32 + 32) + (32 * 25 * 64 + 64)
    assert {name: (type(kind).__name__, kind.client_bytes(2)) for name, kind in down.items()} == {
        "personal": ("Own", 4 * convolutions),
        "decision": ("Shared", 4 * (878_538 - convolutions)),
    }


class TestPFedCFROfFourGroups(AlgorithmTests):
    algorithm: ClassVar[str] = "pfedcfr"
    options: ClassVar[dict[str, Any]] = {
        "rules": ["own", "attention", "mean", "attention"],
        "thresholds": [1, 2, 3],
        "alpha": 0.5,
        "sigma": 2.0,
    }
    sections: ClassVar[dict[str, Any]] = {
        "model": {"name": "cnn", "first_channels": 2, "second_channels": 3, "kernel": 3, "padding": 1, "hidden": 5}
    }


def test_every_group_of_layers_has_its_rule_and_own_layers_neither_travel_nor_are_pulled():
    groups: Any = {"rules": ["attention", "own", "mean", "attention"], "thresholds": [1, 2, 3]}
    algorithm = PFedCFR(**groups, alpha=2.0, prox_weight=3.0)
    assert algorithm.split(bound("cnn")) == (
        [("body/conv1/weight", "body/conv1/bias"), ("head/weight", "head/bias")],
        [("body/fc1/weight", "body/fc1/bias")],
    )
    task, batch = small_task.task(), small_task.batch(0)
    algorithm = PFedCFR(rules=["own", "mean"], thresholds=[1], decision_prox_weight=0.7)
    far = {"decision": part_of(tree.row(models(2), 0), algorithm.downlink(task)["decision"].like)}
    w, anchor = small_task.to_numpy(task.init()), small_task.to_numpy({**task.init(), **far["decision"]})
    w = {**w, "W2": anchor["W2"], "b2": anchor["b2"]}
    slopes = numpy_network.gradients(w, *small_task.flat(batch))
    state, up = algorithm.client_update(task, {"model": task.init()}, far, small_task.data([batch], LR))
    small_task.assert_close(state["model"], {name: w[name] - LR * slopes[name] for name in w})
    assert [*up] == [*algorithm.uplink(task)] == ["decision"] and dict(tree.leaves(up["decision"])).keys() == {
        *DECISION
    }


def test_a_self_weight_that_can_become_negative_is_refused():
    task = bound("cnn")
    PFedCFR().check(task, 101)
    with pytest.raises(ConfigError, match=r"alpha = 10000.*sigma = 1e\+06.*P = 102 .*is 1\.01.*at most 9900\.99"):
        PFedCFR().check(task, 102)
    PFedCFR(num_personal_layers=0).check(task, 102)
    PFedCFR(alpha=5, sigma=1).check(task, 1)


@pytest.mark.parametrize(
    "fields, found",
    [
        ({"rules": ["mean", "own", "attention"]}, "None"),
        ({"rules": ["mean", "own", "attention"], "thresholds": [2]}, r"\[2\]"),
        ({"rules": ["mean", "own", "attention"], "thresholds": [3, 2]}, r"\[3, 2\]"),
        ({"rules": ["mean", "own", "attention"], "thresholds": [2, 4]}, r"\[2, 4\]"),
        ({"rules": ["mean", "own", "attention"], "thresholds": [1, 2], "num_personal_layers": 1}, r"\[1, 2\]"),
    ],
)
def test_thresholds_that_do_not_part_the_layers_by_the_rules_are_refused(fields, found):
    wanted = rf"thresholds = {found} .* 4 layers of cnn: give 2 rising thresholds from 1 to 3"
    with pytest.raises(ConfigError, match=wanted):
        PFedCFR(**fields).check(bound("cnn"), 3)


def test_more_personal_layers_than_the_model_has_are_refused():
    PFedCFR(num_personal_layers=4).check(bound("cnn"), 3)
    with pytest.raises(ConfigError, match=r"num_personal_layers = 5, but model cnn has 4 layers.*layer_unit = module"):
        PFedCFR(num_personal_layers=5).check(bound("cnn"), 3)
    PFedCFR(num_personal_layers=8, layer_unit="tensor").check(bound("cnn"), 3)
