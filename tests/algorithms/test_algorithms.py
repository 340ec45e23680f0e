"""Every server rule and every loss, from its equation, in NumPy; and the cases in which two algorithms are one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import comparisons
import numpy_network
import quick_run
import small_task
from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedamp import FedAMP
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.fedfcd import FedFCD
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.algorithms.fedper import FedPer
from pflmpi.algorithms.fedproto import FedProto
from pflmpi.algorithms.fedprox import FedProx
from pflmpi.algorithms.local_only import Local
from pflmpi.algorithms.pfedpm import PFedPM
from pflmpi.algorithms.prototypes import combine_class_means, initial_class_means
from pflmpi.learning.local_training import LocalTraining
from pflmpi.store import run_folder

LR = 0.1


def step(w: dict, gradient: dict) -> dict:
    return {name: w[name] - LR * gradient[name] for name in w}


def other(seed: int, like: tree.Tree) -> tree.Tree:
    generator = torch.Generator().manual_seed(seed)
    return tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator) * 0.5, like)


def test_local_is_plain_sgd_and_sends_nothing():
    task, batch = small_task.task(), small_task.batch(0)
    state, up = Local().client_update(task, Local().init_client(task), {}, small_task.data([batch]))
    w = small_task.to_numpy(task.init())
    small_task.assert_close(state["model"], step(w, numpy_network.gradients(w, *small_task.flat(batch))))
    assert up == {} and Local().uplink(task) == {} and Local().downlink(task) == {}


def test_fedavg_trains_what_it_received():
    task, batch = small_task.task(), small_task.batch(0)
    received = other(1, task.init())
    state, up = FedAvg().client_update(task, {}, {"model": received}, small_task.data([batch]))
    w = small_task.to_numpy(received)
    small_task.assert_close(up["model"], step(w, numpy_network.gradients(w, *small_task.flat(batch))))
    assert state == {}


def test_fedprox_pulls_towards_the_global_model():
    task, batches = small_task.task(), [small_task.batch(0), small_task.batch(1)]
    received = other(1, task.init())
    _, up = FedProx(prox_weight=0.7).client_update(task, {}, {"model": received}, small_task.data(batches))
    anchor = w = small_task.to_numpy(received)
    for batch in batches:
        gradient = numpy_network.gradients(w, *small_task.flat(batch))
        w = step(w, {name: gradient[name] + 0.7 * (w[name] - anchor[name]) for name in w})
    small_task.assert_close(up["model"], w)


def test_fedprox_without_weight_is_fedavg():
    task, data = small_task.task(), small_task.data([small_task.batch(0), small_task.batch(1)])
    down = {"model": task.init()}
    _, fedprox_up = FedProx(prox_weight=0).client_update(task, {}, down, data)
    _, fedavg_up = FedAvg().client_update(task, {}, down, data)
    assert comparisons.same(fedprox_up["model"], fedavg_up["model"])


def test_fedper_shares_the_body_and_keeps_the_head():
    task, batch = small_task.task(), small_task.batch(0)
    received = {"body": other(1, task.init())["body"]}
    head = other(2, task.init())["head"]
    state, up = FedPer().client_update(task, {"head": head}, {"body": received}, small_task.data([batch]))
    w = small_task.to_numpy({**received, "head": head})
    small_task.assert_close({**up["body"], **state}, step(w, numpy_network.gradients(w, *small_task.flat(batch))))
    assert list(up["body"]) == ["body"] and list(state) == ["head"]


def test_fedproto_loss_has_the_distance_to_known_prototypes():
    task, batch = small_task.task(), small_task.batch(0)
    means = other(3, {"m": torch.zeros(small_task.CLASSES, small_task.FEATURES)})["m"]
    known = torch.tensor([True, False, True])
    state = {"model": task.init()}
    new, _ = FedProto(prototype_weight=0.5).client_update(
        task, state, {"prototypes": {"means": means, "known": known}}, small_task.data([batch])
    )
    w = small_task.to_numpy(task.init())
    x, y = small_task.flat(batch)
    z, _ = numpy_network.forward(w, x)
    # d/dz of lambda * 1/B sum_b 1/d ||z_b - C_y||^2
    pull = 0.5 * 2 * (z - means.double().numpy()[y]) / (small_task.FEATURES * len(y)) * known.numpy()[y][:, None]
    small_task.assert_close(new["model"], step(w, numpy_network.gradients(w, x, y, pull)))


@pytest.mark.parametrize(
    "algorithm", [FedProto(), FedProto(loss_on="means"), PFedPM(), FedFCD(alternation="batch")], ids=repr
)
def test_batch_norm_is_in_training_mode_under_losses_of_class_means(algorithm):
    task, client = comparisons.with_batch_norm(), algorithm.init_client(comparisons.with_batch_norm())
    down = algorithm.publish(task, algorithm.init_server(task), np.arange(1))
    state, _ = algorithm.client_update(task, client, down, small_task.data([small_task.batch(0)]))
    assert not torch.equal(tree.at(state, "model/stats/mean"), tree.at(client, "model/stats/mean"))


def test_fedproto_draws_the_mean_of_each_class_of_a_batch_where_asked():
    task, batch = small_task.task(), small_task.batch(0)
    means = other(3, {"m": torch.zeros(small_task.CLASSES, small_task.FEATURES)})["m"]
    known = torch.tensor([True, False, True])
    new, _ = FedProto(prototype_weight=0.5, loss_on="means").client_update(
        task, {"model": task.init()}, {"prototypes": {"means": means, "known": known}}, small_task.data([batch])
    )
    w = small_task.to_numpy(task.init())
    x, y = small_task.flat(batch)
    z, _ = numpy_network.forward(w, x)
    pull = np.zeros_like(z)
    for label in (0, 2):  # d/dz of lambda * ||m_j - C_j||
        apart = z[y == label].mean(0) - means[label].double().numpy()
        pull[y == label] = 0.5 * apart / np.linalg.norm(apart) / (y == label).sum()
    small_task.assert_close(new["model"], step(w, numpy_network.gradients(w, x, y, pull)))


def test_fedproto_loss_on_means_counts_no_class_that_is_not_in_the_batch():
    """Such a class has no gradient either way; it would show in the training loss alone."""
    batch = small_task.batch(0)
    batch = replace(batch, y=torch.zeros_like(batch.y))
    local = LocalTraining(None, ())
    task, means = small_task.task(), other(3, {"m": torch.zeros(small_task.CLASSES, small_task.FEATURES)})["m"]
    prototypes = {"means": means, "known": torch.tensor([True, False, True])}
    FedProto(prototype_weight=0.5, loss_on="means").client_update(
        task.replace(local=local), {"model": task.init()}, {"prototypes": prototypes}, small_task.data([batch])
    )
    z, scores = numpy_network.forward(small_task.to_numpy(task.init()), small_task.flat(batch)[0])
    fit = np.mean(np.log(np.exp(scores).sum(1)) - scores[:, 0])
    expected = fit + 0.5 * np.linalg.norm(z.mean(0) - means[0].double().numpy())
    np.testing.assert_allclose(local.mean_loss(batch.x), expected, rtol=1e-5)


def test_fedproto_sends_the_means_of_the_model_after_training():
    """A defect of public code: features are collected while the model still trains."""
    task, batch = small_task.task(), small_task.batch(0)
    prototypes = initial_class_means(task)
    new, up = FedProto().client_update(
        task, {"model": task.init()}, {"prototypes": prototypes}, small_task.data([batch], lr=0.5)
    )
    x, y = small_task.flat(batch)
    for model, apart in ((new["model"], False), (task.init(), True)):
        z, _ = numpy_network.forward(small_task.to_numpy(model), x)
        for label in np.unique(y):
            away = np.abs(up["means"]["means"][label].numpy() - z[y == label].mean(0)).max()
            assert away > 1e-3 if apart else away < 1e-6


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 6.0), ("clients", 4.0), ("as_printed", 3.0)])
def test_fedproto_weighs_class_means_as_it_is_told(weighting, expected):
    task = small_task.task()
    means = torch.zeros(2, small_task.FEATURES)
    means[1] = 8.0
    up = {
        "labels": torch.tensor([1, 1], dtype=torch.int32),
        "counts": torch.tensor([1, 3], dtype=torch.int32),
        "means": means,
        "clients": torch.tensor([0, 1]),
    }
    algorithm = FedProto(class_mean_weighting=weighting)
    new = algorithm.server_update(task, algorithm.init_server(task), {"means": up}, Round(1, np.array([0, 1]), 0))
    assert new["known"].tolist() == [False, True, False] and set(new["means"][1].tolist()) == {expected}


def test_class_means_combine_in_three_ways():
    up = {
        "labels": torch.tensor([0, 2, 0], dtype=torch.int32),
        "counts": torch.tensor([1, 5, 3], dtype=torch.int32),
        "means": torch.tensor([[0.0, 4.0], [7.0, 7.0], [8.0, 0.0]]),
        "clients": torch.tensor([0, 0, 1]),
    }
    previous = {"means": torch.full((3, 2), 9.0), "known": torch.tensor([False, True, False])}
    expected = {"samples": [6.0, 1.0], "clients": [4.0, 2.0], "as_printed": [3.0, 0.5]}
    for weighting, first in expected.items():
        combined = combine_class_means(up, previous, weighting)
        assert combined["means"].tolist() == [first, [9.0, 9.0], [7.0, 7.0]], weighting
        assert combined["known"].tolist() == [True, True, True]


@pytest.mark.parametrize("algorithm", [FedProto(), FedFCD(), PFedPM()], ids=lambda instance: type(instance).__name__)
def test_a_class_without_uploads_keeps_the_global_mean_it_had(algorithm):
    task = small_task.task()
    old = other(8, {"means": torch.zeros(small_task.CLASSES, small_task.FEATURES)})["means"]
    server = {**algorithm.init_server(task), "means": old, "known": torch.tensor([True, True, False])}
    up = {
        "means": {
            "labels": torch.tensor([0], dtype=torch.int32),
            "counts": torch.tensor([4], dtype=torch.int32),
            "means": torch.ones(1, small_task.FEATURES),
            "clients": torch.tensor([1]),
        }
    }
    new = algorithm.server_update(task, server, up, Round(2, np.array([1]), 0))
    assert torch.equal(new["means"], torch.stack([torch.ones(small_task.FEATURES), old[1], old[2]]))
    assert new["known"].tolist() == [True, True, False]


def test_fedproto_predicts_the_nearest_known_prototype():
    task = small_task.task()
    model = task.init()
    x = small_task.batch(5).x
    z = task.features(model, x)
    means = torch.stack([z[0], z[1], z[2] + 100])
    server = {"means": means, "known": torch.tensor([True, True, False])}
    scores = FedProto().predict(task, {"model": model}, {"prototypes": server}, x)
    assert scores.argmax(1)[:2].tolist() == [0, 1]
    np.testing.assert_allclose(scores[1, 0].item(), -((z[1] - z[0]) ** 2).sum().item(), rtol=1e-5)
    assert (scores[:, 2] == -torch.inf).all()
    unknown = {"means": means, "known": torch.zeros(3, dtype=torch.bool)}
    assert torch.equal(FedProto().predict(task, {"model": model}, {"prototypes": unknown}, x), task.predict(model, x))


def amp_oracle(models: np.ndarray, alpha: float, sigma: float) -> np.ndarray:
    """Equation 4, client by client."""
    mixed = np.zeros_like(models)
    for i, model_i in enumerate(models):
        xi = [
            0.0 if i == j else alpha * np.exp(-((model_i - model_j) ** 2).sum() / sigma) / sigma
            for j, model_j in enumerate(models)
        ]
        xi = np.array(xi) / max(sum(xi), 1)
        mixed[i] = xi @ models + (1 - xi.sum()) * model_i
    return mixed


@pytest.mark.parametrize("alpha, sigma", [(0.3, 2.0), (50.0, 3.0), (500.0, 100.0), (0.0, 1.0)])  # 500: sums above 1
def test_fedamp_server_rule(alpha, sigma):
    task = small_task.task(clients=5)
    uploaded = tree.stack([other(seed, task.like("body", "head")) for seed in range(3)])
    algorithm = FedAMP(alpha=alpha, sigma=sigma)
    new = algorithm.answer(task, {}, {"model": uploaded}, Round(1, np.array([0, 2, 4]), 0))
    flat = np.concatenate([leaf.flatten(1).double().numpy() for _, leaf in tree.leaves(uploaded)], 1)
    rows = np.concatenate([leaf.flatten(1).double().numpy() for _, leaf in tree.leaves(new["cloud"])], 1)
    np.testing.assert_allclose(rows, amp_oracle(flat, alpha, sigma), atol=1e-6)


def test_fedamp_proximal_term_has_a_gradient():
    task, batch = small_task.task(), small_task.batch(0)
    cloud = other(7, task.init())
    algorithm = FedAMP(alpha=2.0, prox_weight=3.0, sigma=1.0)
    state, up = algorithm.client_update(task, {"model": task.init()}, {"cloud": cloud}, small_task.data([batch]))
    w, u = small_task.to_numpy(task.init()), small_task.to_numpy(cloud)
    gradient = numpy_network.gradients(w, *small_task.flat(batch))
    small_task.assert_close(state["model"], step(w, {k: gradient[k] + 3.0 / 2.0 * (w[k] - u[k]) for k in w}))
    assert comparisons.same(up["model"], state["model"])


def test_fedamp_without_alpha_is_local():
    task, data = small_task.task(), small_task.data([small_task.batch(0)])
    down = {"cloud": other(7, task.init())}
    fedamp_state, _ = FedAMP(alpha=0).client_update(task, {"model": task.init()}, down, data)
    local_state, _ = Local().client_update(task, {"model": task.init()}, {}, data)
    assert comparisons.same(fedamp_state["model"], local_state["model"])


def gmh_upload() -> dict:
    return {
        "means": {
            "labels": torch.tensor([0, 2, 0, 2, 0], dtype=torch.int32),
            "means": other(1, {"m": torch.zeros(5, small_task.FEATURES)})["m"],
            "clients": torch.tensor([0, 0, 1, 1, 3]),
        }
    }


@pytest.mark.parametrize("option", [None, 1, 2])
@pytest.mark.parametrize("variant, batch_size", [("full", 100), ("full", 2), ("onehead", 100), ("onehead", 2)])
def test_fedgmh_server_trains_each_head_on_its_own_label(variant, batch_size, option):
    task = small_task.task(batch_size=batch_size)
    algorithm = FedGMH(variant=variant, head_lr=0.8, server_batch_size=option)
    batch_size = option or batch_size
    server = {"heads": other(2, algorithm.init_server(task)["heads"])}
    up = gmh_upload()
    new = algorithm.server_update(task, server, up, Round(1, np.array([0, 1, 3]), 0))
    labels, means = up["means"]["labels"].numpy(), up["means"]["means"].double().numpy()
    for head in range(1 if variant == "onehead" else small_task.CLASSES):
        weight = server["heads"]["weight"][head].double().numpy()
        bias = server["heads"]["bias"][head].double().numpy()
        rows = np.arange(5) if variant == "onehead" else np.flatnonzero(labels == head)
        for start in range(0, len(rows), batch_size):
            chosen = rows[start : start + batch_size]
            error = numpy_network.softmax(means[chosen] @ weight.T + bias)
            error[np.arange(len(chosen)), labels[chosen]] -= 1
            weight, bias = weight - 0.8 * error.T @ means[chosen] / len(chosen), bias - 0.8 * error.mean(0)
        np.testing.assert_allclose(new["heads"]["weight"][head], weight, atol=1e-6)
        np.testing.assert_allclose(new["heads"]["bias"][head], bias, atol=1e-6)
    if variant == "full":
        assert torch.equal(new["heads"]["weight"][1], server["heads"]["weight"][1]), "no upload, no step"


def test_fedgmh_mixes_received_heads_at_critical_entries():
    task, batch = small_task.task(), small_task.batch(0)
    algorithm = FedGMH(critical_share=0.4)
    client = {"model": other(3, task.init()), "critical": {}}
    generator = torch.Generator().manual_seed(5)
    client["critical"] = tree.map(
        lambda leaf: torch.rand(leaf.shape, generator=generator) < 0.5, client["model"]["head"]
    )
    heads = other(4, algorithm.init_server(task)["heads"])
    data = small_task.data([batch])
    state, up = algorithm.client_update(task, client, {"heads": heads}, data)

    w = small_task.to_numpy(client["model"])
    share = np.bincount(batch.y.numpy(), minlength=small_task.CLASSES) / len(batch.y)
    for name, key in (("weight", "W2"), ("bias", "b2")):
        mixed = np.tensordot(share, heads[name].double().numpy(), 1)
        psi = client["critical"][name].numpy()
        w[key] = w[key] * ~psi + mixed * psi  # equation 9
    before = w
    after = step(w, numpy_network.gradients(w, *small_task.flat(batch)))
    small_task.assert_close(state["model"], after)

    importance = np.concatenate([np.abs((after[k] - before[k]) * after[k]).ravel() for k in ("W2", "b2")])
    size = len(importance)
    expected = np.zeros(size, bool)
    expected[np.argsort(-importance, kind="stable")[: int(0.4 * size)]] = True
    critical = np.concatenate([state["critical"][name].numpy().ravel() for name in ("weight", "bias")])
    assert critical.sum() == int(0.4 * size) and (critical == expected).all()

    x, y = small_task.flat(batch)
    z, _ = numpy_network.forward(after, x)
    for label in np.unique(y):
        np.testing.assert_allclose(up["means"]["means"][label], z[y == label].mean(0), atol=1e-6)


def test_critical_entries_break_ties_by_lower_index_weight_first():
    def critical_entries(before: tree.Tree, after: tree.Tree, share: float) -> tree.Tree:
        return FedGMH(critical_share=share).critical_entries(before, after)

    before = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    after = {"weight": torch.tensor([[1.0, 2.0], [1.0, 1.0]]), "bias": torch.tensor([1.0, 2.0])}

    entries = critical_entries(before, after, 0.5)
    assert entries["weight"].tolist() == [[True, True], [False, False]] and entries["bias"].tolist() == [False, True]
    everything, nothing = critical_entries(before, after, 1.0), critical_entries(before, after, 0.0)
    assert all(leaf.all() for _, leaf in tree.leaves(everything))
    assert not any(leaf.any() for _, leaf in tree.leaves(nothing))
    # In a head of the paper's size, where a sort may be unstable.
    large = {"weight": torch.ones(10, 512), "bias": torch.ones(10)}
    entries = critical_entries(tree.map(torch.zeros_like, large), large, 0.5)
    assert entries["weight"].flatten().tolist() == [True] * 2565 + [False] * 2555 and not entries["bias"].any()


def test_critical_entries_by_the_final_value_the_squared_change_or_of_each_tensor_alone():
    """Of six entries three: |4 * 5|, |3 * 6|, |2 * 7| by eq. 8; by theta^0 the fifth is first, |9 * 9.5|."""
    before = {"weight": torch.tensor([[1.0, 3.0], [5.0, 7.0]]), "bias": torch.tensor([9.5, 0.0])}
    after = {"weight": torch.tensor([[5.0, 6.0], [7.0, 8.0]]), "bias": torch.tensor([0.5, 1.0])}

    def critical(**options: Any) -> list[bool]:
        entries = FedGMH(critical_share=0.5, **options).critical_entries(before, after)
        return [*entries["weight"].flatten().tolist(), *entries["bias"].tolist()]

    assert critical() == [True, True, True, False, False, False]  # 20, 18, 14, 8, 4.5, 1
    assert critical(importance="squared_change") == [True, True, False, False, True, False]  # 80, 54, 28, 8, 40.5, 1
    assert critical(ranked="tensor") == [True, True, False, False, True, False]  # two of four, one of two


def test_fedgmh_can_keep_its_own_critical_entries_and_take_the_others():
    task, data = small_task.task(), small_task.data([small_task.batch(0)])
    own = FedGMH(critical_from="own", critical_share=0.4)
    heads = other(4, own.init_server(task)["heads"])
    first, _ = own.client_update(task, own.init_client(task), {"heads": heads}, data)
    everywhere = FedGMH(critical_share=0.4)
    client = everywhere.init_client(task)
    client["critical"] = tree.map(torch.ones_like, client["critical"])
    all_critical, _ = everywhere.client_update(task, client, {"heads": heads}, data)
    assert comparisons.same(first["model"], all_critical["model"]), (
        "none is critical before: the whole head is the global heads'"
    )

    second, _ = own.client_update(task, first, {"heads": heads}, data)
    reversed_ = {**first, "critical": tree.map(torch.logical_not, first["critical"])}
    expected, _ = everywhere.client_update(task, reversed_, {"heads": heads}, data)
    unlike, _ = everywhere.client_update(task, first, {"heads": heads}, data)
    assert comparisons.same(second["model"], expected["model"]) and not comparisons.same(
        second["model"], unlike["model"]
    )


def test_fedgmh_without_critical_entries_keeps_the_local_head():
    task, data = small_task.task(), small_task.data([small_task.batch(0)])
    algorithm = FedGMH(critical_share=0.0)
    fedgmh_state, _ = algorithm.client_update(
        task, algorithm.init_client(task), {"heads": other(4, algorithm.init_server(task)["heads"])}, data
    )
    local_state, _ = Local().client_update(task, {"model": task.init()}, {}, data)
    assert comparisons.same(fedgmh_state["model"], local_state["model"])


def test_fedgmh_is_evaluated_with_the_new_heads_mixed_in_where_asked():
    task, batch = small_task.task(), small_task.batch(0)
    algorithm, plain = FedGMH(critical_share=0.4, evaluated="mixed"), FedGMH(critical_share=0.4)
    assert algorithm.predicts_with == ("heads",) and plain.predicts_with == ()
    client = algorithm.init_client(task)
    heads = other(4, algorithm.init_server(task)["heads"])
    untrained = algorithm.predict(task, client, {"heads": heads}, batch.x)
    assert torch.equal(untrained, task.predict(client["model"], batch.x)), (
        "a client that has not trained has its own head"
    )
    state, _ = algorithm.client_update(task, client, {"heads": heads}, small_task.data([batch]))
    trained, _ = plain.client_update(task, plain.init_client(task), {"heads": heads}, small_task.data([batch]))
    assert comparisons.same(state["model"], trained["model"]) and "shares" not in trained, "training is the same"

    fresh = other(5, heads)
    share = np.bincount(batch.y.numpy(), minlength=small_task.CLASSES) / len(batch.y)
    w = small_task.to_numpy(state["model"])
    for name, key in (("weight", "W2"), ("bias", "b2")):
        psi = state["critical"][name].numpy()
        w[key] = w[key] * ~psi + np.tensordot(share, fresh[name].double().numpy(), 1) * psi
    expected = numpy_network.forward(w, small_task.flat(batch)[0])[1]
    np.testing.assert_allclose(algorithm.predict(task, state, {"heads": fresh}, batch.x), expected, atol=1e-5)


@pytest.mark.parametrize("variant", ["full", "onehead", "avghead", "oneavg"])
def test_fedgmh_evaluates_a_client_that_has_not_trained_with_its_own_head(variant):
    task, x = small_task.task(), small_task.batch(0).x
    algorithm = FedGMH(variant=variant, evaluated="mixed")
    client = algorithm.init_client(task)
    published = algorithm.publish(task, {"heads": other(4, algorithm.init_server(task)["heads"])}, np.arange(4))
    assert torch.equal(algorithm.predict(task, client, published, x), task.predict(client["model"], x))


@pytest.mark.parametrize("variant", ["full", "onehead", "avghead", "oneavg"])
def test_fedgmh_trains_the_same_however_it_is_evaluated(variant):
    task, data, states = small_task.task(), small_task.data([small_task.batch(0)]), []
    for evaluated in ("trained", "mixed"):
        algorithm = FedGMH(variant=variant, evaluated=evaluated)
        published = algorithm.publish(task, {"heads": other(4, algorithm.init_server(task)["heads"])}, np.arange(4))
        states.append(algorithm.client_update(task, algorithm.init_client(task), published, data)[0])
    assert comparisons.same(states[0]["model"], states[1]["model"])


@pytest.mark.parametrize("variant, heads", [("full", 2), ("onehead", 1), ("avghead", 2), ("oneavg", 1)])
def test_fedgmh_sends_what_the_paper_counts(variant, heads):
    task, algorithm = small_task.task(), FedGMH(variant=variant)
    entries = small_task.CLASSES * (small_task.FEATURES + 1)  # L, weight and bias
    assert algorithm.uplink(task)["means"].client_bytes(2) == 2 * (4 * small_task.FEATURES + 4)
    assert algorithm.downlink(task)["heads"].client_bytes(2) == heads * 4 * entries


def test_labels_of_fedgmh_go_one_after_another_and_come_back():
    data, algorithm = small_task.data([small_task.batch(0)]), FedGMH(label_turnover=2)

    def present(round: int, counts: list[float]) -> list[bool]:
        mask = algorithm.present(replace(data, round=round, class_counts=torch.tensor(counts)))
        assert mask is not None
        return mask.tolist()

    sizes = [3.0, 0.0, 2.0]
    turns = [[False, False, True], [True, False, False], [True, False, True]]  # the first gone, the second, none
    assert [present(round, sizes) for round in range(1, 8)] == [turn for turn in turns for _ in range(2)] + [turns[0]]
    assert present(1, [0.0, 4.0, 0.0]) == [False, True, False], "the only label stays"


def test_fedgmh_without_a_label_is_that_of_a_client_that_never_had_it():
    task, batch = small_task.task(), small_task.batch(0)
    algorithm, plain = FedGMH(label_turnover=1), FedGMH()
    heads = other(4, plain.init_server(task)["heads"])
    gone = int(batch.y.min())
    rest = type(batch)(batch.x[batch.y != gone], batch.y[batch.y != gone])
    client = plain.init_client(task)
    client["critical"] = tree.map(torch.ones_like, client["critical"])  # so that the whole head is the heads' mix
    state, up = algorithm.client_update(task, client, {"heads": heads}, small_task.data([batch]))
    expected, sent = plain.client_update(task, client, {"heads": heads}, small_task.data([rest]))
    for path, leaf in tree.leaves(state["model"]):
        np.testing.assert_allclose(leaf, tree.at(expected["model"], path), atol=1e-6, err_msg=path)
    np.testing.assert_allclose(up["means"]["means"], sent["means"]["means"], atol=1e-6)
    assert up["means"]["counts"][gone] == 0 and not up["means"]["means"][gone].any()

    server, message = {"heads": heads}, gmh_upload()["means"]
    remaining = {name: leaf[1:] for name, leaf in message.items()}
    message = {**message, "counts": torch.tensor([0, 2, 1, 1, 5], dtype=torch.int32)}
    new = algorithm.server_update(task, server, {"means": message}, Round(1, np.array([0, 1, 3]), 0))
    assert comparisons.same(
        new, plain.server_update(task, server, {"means": remaining}, Round(1, np.array([0, 1, 3]), 0))
    )


@pytest.mark.parametrize("variant", ["avghead", "oneavg"])
def test_fedgmh_averaging_ablations(variant):
    task, batch = small_task.task(), small_task.batch(0)
    algorithm = FedGMH(variant=variant)
    client = {"model": other(3, task.init())}
    published = algorithm.publish(task, {"heads": other(4, algorithm.init_server(task)["heads"])}, np.arange(4))
    state, _ = algorithm.client_update(task, client, published, small_task.data([batch]))
    w = small_task.to_numpy(client["model"])
    share = np.bincount(batch.y.numpy(), minlength=small_task.CLASSES) / len(batch.y)
    for name, key in (("weight", "W2"), ("bias", "b2")):
        received = published["heads"][name].double().numpy()
        received = received if variant == "oneavg" else np.tensordot(share, received, 1)
        w[key] = (w[key] + received) / 2  # equations 10 and 11
    small_task.assert_close(state["model"], step(w, numpy_network.gradients(w, *small_task.flat(batch))))
    assert "critical" not in state


class Dropping(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.drop, self.fc = nn.Linear(64, 12), nn.Dropout(0.3), nn.Linear(12, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(self.first(x.flatten(1)).relu()))


LOCAL, FEDAVG = {"name": "local"}, {"name": "fedavg"}
BY_CLIENTS, BY_SAMPLES = {**FEDAVG, "weighting": "clients"}, {**FEDAVG, "weighting": "samples"}
APFL, PFEDAFE = {"name": "apfl", "adaptive": False}, {"name": "pfedafe", "adaptive": False}
PERFEDAVG = {"name": "perfedavg", "inner_lr": 0.0}
# Its coin all but always aggregates: then a run of local steps is one step.
L2GD = {"name": "l2gd", "prox_weight": 0.0, "aggregation_probability": 1 - 1e-9}

STEADY, DECAY = {"training": {"momentum": 0.5}}, {"training": {"momentum": 0.5, "weight_decay": 0.01}}
DROPPING = {**DECAY, "model": {"name": f"{__file__}:Dropping", "head": "fc"}}
ALWAYS = {"training": {"momentum": 0.5, "participation": 1.0}}
ALONE = {"partition": {"name": "iid", "clients": 1}, "data": {"name": "digits", "limit": 100}}

SERVER, OWN_BODY = {"server/": "server/"}, {"clients/body/": "clients/model/body/"}


@pytest.mark.parametrize(
    "first, second, sections, parts, tolerance",
    [
        ({**APFL, "alpha": 0.0, "weighting": "clients"}, BY_CLIENTS, DECAY, SERVER, 0),
        ({**APFL, "alpha": 0.0, "weighting": "samples"}, BY_SAMPLES, DECAY, SERVER, 0),
        ({**APFL, "alpha": 0.0, "weighting": "samples"}, BY_SAMPLES, DROPPING, SERVER, 0),
        ({**APFL, "alpha": 1.0}, LOCAL, DECAY, {"clients/own/": "clients/model/"}, 0),
        ({**APFL, "alpha": 1.0}, LOCAL, DROPPING, {"clients/own/": "clients/model/"}, 0),
        ({"name": "ditto", "prox_weight": 0.0}, BY_CLIENTS, STEADY, SERVER, 0),
        ({"name": "ditto", "prox_weight": 1.0}, BY_CLIENTS, STEADY, SERVER, 0),
        (
            {"name": "ditto", "prox_weight": 0.0},
            LOCAL,
            {"training": {"momentum": 0.5, "epochs": 2}},
            {"clients/personal/": "clients/model/"},
            0,
        ),
        ({"name": "fedavgm", "server_momentum": 0.0}, FEDAVG, {}, {"server/model/": "server/model/"}, 1e-5),
        ({"name": "fednova"}, FEDAVG, {"training": {"steps": 3}}, SERVER, 1e-5),
        ({"name": "fesem", "num_clusters": 1}, BY_CLIENTS, {}, {"server/centres/": "server/model/"}, 1e-6),
        (L2GD, LOCAL, {"training": {"momentum": 0.5, "participation": 1.0, "steps": 1}}, {"clients/": "clients/"}, 0),
        # 1e-7: the mean over one client is its head, but for the conversion to fixed point and back.
        ({"name": "lgfedavg"}, LOCAL, ALONE, {**OWN_BODY, "server/head/": "clients/model/head/"}, 1e-7),
        ({**PERFEDAVG, "order": "first"}, BY_CLIENTS, {"training": {"epochs": 2}}, {"": ""}, 0),
        ({**PERFEDAVG, "order": "hessian_free"}, BY_CLIENTS, {"training": {"epochs": 2}}, {"": ""}, 0),
        (
            {**PFEDAFE, "beta_init": 0.0},
            {"name": "fedper", "weighting": "clients"},
            STEADY,
            {**SERVER, "clients/head/": "clients/head/"},
            0,
        ),
        ({**PFEDAFE, "beta_init": 1.0}, LOCAL, ALWAYS, {**OWN_BODY, "clients/head/": "clients/model/head/"}, 0),
    ],
)
def test_with_these_options_an_algorithm_is_another_one(first, second, sections, parts, tolerance, tmp_path):
    """The state of the other is `parts` of its state, by other names."""
    for folder, algorithm in (("first", first), ("second", second)):
        quick_run.run(quick_run.settings(sections, algorithm=algorithm), tmp_path / folder)
    state, expected = (comparisons.state_of(tmp_path / folder) for folder in ("first", "second"))
    renamed = {
        path.replace(part, name, 1): array
        for part, name in parts.items()
        for path, array in state.items()
        if path.startswith(part)
    }
    assert renamed.keys() == expected.keys() and len(expected) > 3
    for path, array in expected.items():  # a server has no axis of clients, that of FeSEM one of clusters
        ours = renamed[path].reshape(array.shape)
        np.testing.assert_allclose(ours, array, rtol=0, atol=tolerance, equal_nan=False, err_msg=path)
    if (first["name"], second["name"]) != ("ditto", "fedavg"):  # which is scored by its personal models
        for round in (1, 2, 3):
            ours, theirs = (
                run_folder.read_metrics(tmp_path / folder, round)["correct"] for folder in ("first", "second")
            )
            assert np.array_equal(ours, theirs)
