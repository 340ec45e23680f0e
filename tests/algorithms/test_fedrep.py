"""FedRep: the head's epochs, then the body's, step by step; what travels and what stays."""

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import small_task
from pflmpi import tree
from pflmpi.algorithms.base import only
from pflmpi.algorithms.fedrep import FedRep
from pflmpi.learning.client import ClientData
from pflmpi.messages.kinds import Mean

LR = 0.1


def data(head, body):
    return ClientData({"head": head, "body": body}, body, torch.full((small_task.CLASSES,), 4.0), LR, 1)


def start(task):
    """A client's head and a received body that is not the one it started with."""
    received = tree.map(lambda entry: entry + 0.1, only(task.init(), ("body", *task.shared_stats)))
    return FedRep().init_client(task), received


def test_all_head_steps_come_before_all_body_steps_and_each_has_its_own_momentum():
    task = small_task.task(momentum=0.5)
    client, body = start(task)
    head_pass, body_pass = [small_task.batch(seed) for seed in (0, 1, 2)], [small_task.batch(seed) for seed in (3, 4)]
    state, up = FedRep().client_update(task, client, {"body": body}, data(head_pass, body_pass))

    w = small_task.to_numpy({**body, **client})
    for names, batches in ((("W2", "b2"), head_pass), (("W1", "b1"), body_pass)):
        velocity = {name: np.zeros_like(w[name]) for name in names}
        for batch in batches:
            slopes = numpy_network.gradients(w, *small_task.flat(batch))
            for name in names:
                velocity[name] = 0.5 * velocity[name] + slopes[name]
                w[name] = w[name] - LR * velocity[name]
    small_task.assert_close({**up["body"], **state}, w)
    assert list(state) == ["head"] and list(up) == ["body"] and list(up["body"]) == ["body"], "the head never travels"


def test_the_body_is_fixed_while_the_head_is_trained():
    task = small_task.task(weight_decay=0.1)
    client, body = start(task)
    state, up = FedRep().client_update(task, client, {"body": body}, data([small_task.batch(0)], []))
    assert comparisons.same(up["body"], body) and not comparisons.same(state, client)


def test_without_head_epochs_the_head_never_moves():
    task = small_task.task(weight_decay=0.1)
    algorithm = FedRep(head_epochs=0)
    assert task.training.num_steps(40, algorithm.passes(task, 1)["head"]) == 0
    client, body = start(task)
    state, up = algorithm.client_update(task, client, {"body": body}, data([], [small_task.batch(0)]))
    assert comparisons.same(state, client) and not comparisons.same(up["body"], body)


@pytest.mark.parametrize("training, body_steps", [({"epochs": 2}, 8), ({"epochs": 2, "steps": 3}, 3)])
def test_head_epochs_are_its_own_and_the_body_has_the_configured_length(training, body_steps):
    task = small_task.task(batch_size=10, **training)
    passes = FedRep().passes(task, 1)
    assert list(passes) == ["head", "body"]
    assert task.training.num_steps(40, passes["head"]) == 10 * 4
    assert task.training.num_steps(40, passes["body"]) == body_steps


def test_bodies_are_averaged_plainly_unless_asked_otherwise():
    for algorithm, expected in ((FedRep(), "clients"), (FedRep(weighting="samples"), "samples")):
        kind = algorithm.uplink(small_task.task())["body"]
        assert isinstance(kind, Mean) and kind.by == expected


@pytest.mark.parametrize("bn", ["average", "local"])
def test_head_epochs_use_batch_norm_statistics_and_do_not_change_them(bn):
    task, batch = comparisons.with_batch_norm(bn=bn), small_task.batch(0)
    client, body = start(task)
    before = {**body, **client}
    z = task.features(before, batch.x).double().numpy()  # in evaluation mode
    weight, bias = (before["head"][name].double().numpy() for name in ("weight", "bias"))
    error = numpy_network.softmax(z @ weight.T + bias)
    error[np.arange(len(z)), batch.y.numpy()] -= 1

    state, up = FedRep().client_update(task, client, {"body": body}, data([batch], []))
    after = {**up["body"], **state}
    np.testing.assert_allclose(after["head"]["weight"], weight - LR * error.T @ z / len(z), atol=1e-6)
    assert comparisons.same(after["stats"], before["stats"]) and ("stats" in state) == (bn == "local")

    state, up = FedRep().client_update(task, client, {"body": body}, data([], [batch]))
    assert not comparisons.same({**up["body"], **state}["stats"], before["stats"]), "they follow the body"
