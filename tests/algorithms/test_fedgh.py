"""FedGH: one head of the server's replaces all others, and really learns."""

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import small_task
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedgh import FedGH
from pflmpi.algorithms.local_only import Local
from pflmpi.algorithms.prototypes import train_head

LR = 0.1


def uploaded(data_seed):
    """What the server gets from clients 0 and 3, of which the second holds classes 0 and 2 alone."""
    rng = np.random.default_rng(data_seed)
    labels = [0, 1, 2, 0, 2]
    return {
        "means": {
            "labels": torch.tensor(labels, dtype=torch.int32),
            "means": torch.from_numpy(rng.normal(size=(len(labels), small_task.FEATURES))).float(),
            "clients": torch.tensor([0, 0, 0, 3, 3]),
        }
    }


def test_a_client_trains_body_and_received_head_and_keeps_the_body_alone():
    task, batches = small_task.task(), [small_task.batch(0), small_task.batch(1)]
    client, head = {"body": comparisons.model(1)["body"]}, comparisons.model(2)["head"]
    state, up = FedGH().client_update(task, client, {"head": head}, small_task.data(batches))
    w = small_task.to_numpy({**client, "head": head})
    for batch in batches:  # the second step's body gradient goes through a head that the first has moved
        slopes = numpy_network.gradients(w, *small_task.flat(batch))
        w = {name: w[name] - LR * slopes[name] for name in w}
    assert list(state) == ["body"]
    small_task.assert_close({**state, "head": head}, {**w, "W2": head["weight"].numpy(), "b2": head["bias"].numpy()})

    x, y = (np.concatenate(parts) for parts in zip(*(small_task.flat(batch) for batch in batches), strict=True))
    z, _ = numpy_network.forward(w, x)
    for label in np.unique(y):
        np.testing.assert_allclose(up["means"]["means"][label], z[y == label].mean(0), atol=1e-6)


@pytest.mark.parametrize("server_batch_size, pairs", [(1, 1), (2, 2), (None, 4)])
def test_the_server_takes_a_step_on_every_pair_or_minibatch_of_pairs(server_batch_size, pairs):
    task = small_task.task(batch_size=4)
    algorithm = FedGH(global_head_lr=0.3, server_batch_size=server_batch_size, server_epochs=2)
    server, up, round = {"head": comparisons.model(2)["head"]}, uploaded(0), Round(5, np.array([0, 3]), 9)
    new_head = algorithm.server_update(task, server, up, round)["head"]

    weight, bias = (server["head"][name].double().numpy() for name in ("weight", "bias"))
    labels, means = up["means"]["labels"].numpy(), up["means"]["means"].double().numpy()
    rng = round.stream("server head")
    for order in (rng.permutation(5), rng.permutation(5)):
        for chosen in np.split(order, range(pairs, 5, pairs)):
            error = numpy_network.softmax(means[chosen] @ weight.T + bias)
            error[np.arange(len(chosen)), labels[chosen]] -= 1
            weight, bias = weight - 0.3 * error.T @ means[chosen] / len(chosen), bias - 0.3 * error.mean(0)
    np.testing.assert_allclose(new_head["weight"], weight, rtol=0, atol=1e-6)
    np.testing.assert_allclose(new_head["bias"], bias, rtol=0, atol=1e-6)


def test_the_fresh_global_head_predicts_on_the_clients_own_body():
    task, x = small_task.task(), small_task.batch(3).x
    client, head = {"body": comparisons.model(1)["body"]}, comparisons.model(2)["head"]
    _, expected = numpy_network.forward(small_task.to_numpy({**client, "head": head}), x.flatten(1).double().numpy())
    np.testing.assert_allclose(FedGH().predict(task, client, {"head": head}, x), expected, atol=1e-6)


def test_the_first_round_trains_the_body_as_local_training_does():
    task, data = small_task.task(), small_task.data([small_task.batch(0), small_task.batch(1)])
    algorithm = FedGH()
    down = algorithm.publish(task, algorithm.init_server(task), np.arange(4))
    fedgh_state, _ = algorithm.client_update(task, algorithm.init_client(task), down, data)
    local_state, _ = Local().client_update(task, Local().init_client(task), {}, data)
    assert comparisons.same(fedgh_state["body"], local_state["model"]["body"])


def test_client_0_does_not_move_the_servers_head_by_its_training():
    """A defect of public code: the server's head is the same object as client 0's."""
    task, algorithm = small_task.task(), FedGH()
    server = algorithm.init_server(task)
    client, down = algorithm.init_client(task), algorithm.publish(task, server, np.arange(4))
    algorithm.client_update(task, client, down, small_task.data([small_task.batch(0)]))
    assert comparisons.same(server, algorithm.init_server(task)), "training changed the server's head"
    assert comparisons.same(algorithm.publish(task, server, np.arange(4))["head"], task.init()["head"])


def test_the_global_head_learns_the_uploaded_means():
    """A defect of public code: the server's optimiser holds other parameters, so the head stays as it was drawn."""
    task, algorithm, up = small_task.task(), FedGH(global_head_lr=0.5, server_epochs=100), uploaded(1)
    server = algorithm.init_server(task)
    new = algorithm.server_update(task, server, up, Round(1, np.array([0, 3]), 0))
    labels = up["means"]["labels"].long()
    losses = [
        float(torch.nn.functional.cross_entropy(task.logits(state["head"], up["means"]["means"]), labels))
        for state in (server, new)
    ]
    assert losses[1] < 0.05 < 0.5 < losses[0], losses


def test_what_travels_is_counted_as_in_the_paper():
    task, algorithm = small_task.task(), FedGH()
    assert algorithm.uplink(task)["means"].client_bytes(2) == 2 * (4 * small_task.FEATURES + 4)
    assert algorithm.downlink(task)["head"].client_bytes(2) == 4 * small_task.CLASSES * (small_task.FEATURES + 1)


LABELS = [0, 2, 0, 1, 2, 2, 0]


def head(seed):
    rng = np.random.default_rng(seed)
    weight, bias = rng.normal(size=(small_task.CLASSES, small_task.FEATURES)), rng.normal(size=small_task.CLASSES)
    return {"weight": torch.from_numpy(weight).float(), "bias": torch.from_numpy(bias).float()}


def upload(seed, labels):
    means = np.random.default_rng(seed).normal(size=(len(labels), small_task.FEATURES))
    return {"labels": torch.tensor(labels, dtype=torch.int32), "means": torch.from_numpy(means).float()}


@pytest.mark.parametrize("batch_size, epochs", [(1, 1), (3, 2), (100, 1), (100, 3)])
def test_a_head_takes_a_step_of_the_mean_cross_entropy_on_every_minibatch(batch_size, epochs):
    start, up = head(1), upload(2, LABELS)
    trained = train_head(start, up, np.random.default_rng(5), lr=0.7, epochs=epochs, batch_size=batch_size)
    weight, bias = (start[name].double().numpy() for name in ("weight", "bias"))
    means, labels, rng = up["means"].double().numpy(), np.array(LABELS), np.random.default_rng(5)
    for _ in range(epochs):
        order = rng.permutation(len(LABELS))
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            error = numpy_network.softmax(means[chosen] @ weight.T + bias)
            error[np.arange(len(chosen)), labels[chosen]] -= 1
            weight, bias = weight - 0.7 * error.T @ means[chosen] / len(chosen), bias - 0.7 * error.mean(0)
    np.testing.assert_allclose(trained["weight"], weight, rtol=0, atol=1e-6)
    np.testing.assert_allclose(trained["bias"], bias, rtol=0, atol=1e-6)


def test_a_step_is_the_one_that_the_losss_own_gradient_gives():
    start, up = head(1), upload(2, LABELS)
    weight, bias = (start[name].clone().requires_grad_(True) for name in ("weight", "bias"))
    loss = torch.nn.functional.cross_entropy(up["means"] @ weight.mT + bias, up["labels"].long())
    slopes = torch.autograd.grad(loss, (weight, bias))
    trained = train_head(start, up, np.random.default_rng(0), lr=0.5, epochs=1, batch_size=len(LABELS))
    for name, leaf, slope in zip(("weight", "bias"), (weight, bias), slopes, strict=True):
        torch.testing.assert_close(trained[name], (leaf - 0.5 * slope).detach(), rtol=0, atol=1e-6)


def test_the_given_head_stays_as_it_is():
    start, up = head(1), upload(2, LABELS)
    trained = train_head(start, up, np.random.default_rng(0), lr=0.5, epochs=1, batch_size=1)
    assert not torch.equal(trained["weight"], start["weight"])
    assert torch.equal(start["weight"], head(1)["weight"]) and torch.equal(start["bias"], head(1)["bias"])


def test_without_uploads_a_head_stays_as_it_is():
    trained = train_head(head(1), upload(2, []), np.random.default_rng(0), lr=0.5, epochs=1, batch_size=4)
    assert torch.equal(trained["weight"], head(1)["weight"]) and torch.equal(trained["bias"], head(1)["bias"])
