"""pFedAFE: the client's body is a mix of the shared one and its own, in a proportion that is learned anew."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

import comparisons
import numpy_network
import small_task
from pflmpi import tree
from pflmpi.algorithms.pfedafe import PFedAFE, mixed
from pflmpi.learning.client import cross_entropy
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Mean

LR, BODY = 0.1, ("W1", "b1")


def client_of(model, trained=True):
    return {**model, "beta": torch.tensor(0.9), "trained": torch.tensor(trained)}


def shared_body(seed):
    return {"body": {"body": comparisons.model(seed)["body"]}}


def mixed_by_hand(shared, own, beta):
    return {**own, **{name: (1 - beta) * shared[name] + beta * own[name] for name in BODY}}


def beta_by_hand(shared, own, batches, beta, lr):
    """Steps of -lr sum_p <dL/dp, W_i - W> from an initial value, each clamped to [0, 1]."""
    for batch in batches:
        slopes = numpy_network.gradients(mixed_by_hand(shared, own, beta), *small_task.flat(batch))
        beta -= lr * sum((slopes[name] * (own[name] - shared[name])).sum() for name in BODY)
        beta = min(max(beta, 0.0), 1.0)
    return beta


@pytest.mark.parametrize("beta_init, beta_lr", [(0.5, 0.1), (0.3, 0.02)])
def test_beta_takes_plain_steps_along_the_gradient_between_the_bodies(beta_init, beta_lr):
    task, batches = small_task.task(momentum=0.9, weight_decay=0.5), [small_task.batch(0), small_task.batch(1)]
    client, down = client_of(comparisons.model(4)), shared_body(1)
    algorithm = PFedAFE(beta_init=beta_init, beta_lr=beta_lr)
    ratio = algorithm.mixing_ratio(task, client, down["body"], comparisons.data_of({"beta": batches}))
    shared, own = small_task.to_numpy({**client, **down["body"]}), small_task.to_numpy(client)
    expected = beta_by_hand(shared, own, batches, beta_init, beta_lr)
    assert float(ratio) == pytest.approx(expected, abs=1e-6) and abs(expected - beta_init) > 0.01


@pytest.mark.parametrize("own, shared, end", [(4, 1, 0.0), (3, 4, 1.0)])
def test_beta_is_clamped_after_every_step(own, shared, end):
    batches, client = [small_task.batch(0), small_task.batch(1)], client_of(comparisons.model(own))
    data = comparisons.data_of({"beta": batches})
    ratio = PFedAFE(beta_lr=50.0).mixing_ratio(small_task.task(), client, shared_body(shared)["body"], data)
    assert float(ratio) == end


def test_body_and_head_train_together_from_the_mix_with_the_new_beta():
    task, passes = (
        small_task.task(),
        {"train": [small_task.batch(0), small_task.batch(1)], "beta": [small_task.batch(2), small_task.batch(3)]},
    )
    client, down = client_of(comparisons.model(2)), shared_body(1)
    state, up = PFedAFE().client_update(task, client, down, comparisons.data_of(passes, LR))
    shared, own = small_task.to_numpy({**client, **down["body"]}), small_task.to_numpy(client)
    beta = beta_by_hand(shared, own, passes["beta"], 0.5, 0.1)
    w = mixed_by_hand(shared, own, beta)
    for batch in passes["train"]:
        slopes = numpy_network.gradients(w, *small_task.flat(batch))
        w = {name: w[name] - LR * slopes[name] for name in w}
    small_task.assert_close(state, w)
    assert float(state["beta"]) == pytest.approx(beta, abs=1e-6) and bool(state["trained"])
    assert list(up) == ["body"] and list(up["body"]) == ["body"] and comparisons.same(up["body"]["body"], state["body"])


@pytest.mark.parametrize("adaptive", [True, False])
def test_before_its_first_training_a_client_has_the_shared_body_alone(adaptive):
    task, passes = small_task.task(), {"train": [small_task.batch(0)], "beta": [small_task.batch(2)]}
    algorithm, down, data = PFedAFE(adaptive=adaptive), shared_body(1), comparisons.data_of(passes, LR)
    fresh = algorithm.init_client(task)
    assert not fresh["trained"] and float(fresh["beta"]) == 0
    tested = algorithm.adapt(task, fresh, down, data)
    assert comparisons.same(tested["body"], down["body"]["body"]) and comparisons.same(
        tested["head"], task.init()["head"]
    )
    w = small_task.to_numpy(tested)
    slopes = numpy_network.gradients(w, *small_task.flat(passes["train"][0]))
    state, _ = algorithm.client_update(task, fresh, down, data)
    small_task.assert_close(state, {name: w[name] - LR * slopes[name] for name in w})
    assert float(state["beta"]) == 0 and bool(state["trained"])
    assert tree.differences(state, fresh) == []


def test_a_client_is_tested_with_the_mix_of_fresh_and_own_body_and_does_not_train():
    task, batches, x = small_task.task(), [small_task.batch(2), small_task.batch(3)], small_task.batch(9).x
    client, down, algorithm = client_of(comparisons.model(2)), shared_body(1), PFedAFE(beta_init=0.7)
    before = tree.clone(client)
    tested = algorithm.adapt(task, client, down, comparisons.data_of({"beta": batches}))
    shared, own = small_task.to_numpy({**client, **down["body"]}), small_task.to_numpy(client)
    w = mixed_by_hand(shared, own, beta_by_hand(shared, own, batches, 0.7, 0.1))
    small_task.assert_close(tested, w)
    scores = numpy_network.forward(w, x.flatten(1).double().numpy())[1]
    np.testing.assert_allclose(algorithm.predict(task, tested, down, x), scores, atol=1e-5)
    assert comparisons.same(client, before), "what is kept is as it was"


def test_the_server_averages_the_bodies_plainly():
    kind = PFedAFE().uplink(small_task.task())["body"]
    assert isinstance(kind, Mean) and kind.by == "clients"
    body = shared_body(4)["body"]
    assert PFedAFE().server_update(small_task.task(), {}, {"body": body}, None) == {"shared": body}


def test_the_beta_pass_has_its_own_length_and_none_without_adaptation():
    task = small_task.task(epochs=5)
    assert PFedAFE(beta_steps=3).passes(task, 1) == {"train": Pass(), "beta": Pass(steps=3)}
    assert PFedAFE(adaptive=False).passes(task, 1) == {"train": Pass(), "beta": Pass(steps=0)}


@pytest.mark.parametrize("bn", ["average", "local"])
def test_batch_norm_statistics_are_mixed_with_the_body_unless_they_stay_local(bn):
    task, algorithm = comparisons.with_batch_norm(bn=bn), PFedAFE(adaptive=False, beta_init=0.25)
    fresh = algorithm.init_client(task)
    client = {**fresh, "stats": tree.map(lambda leaf: leaf + 2.0, fresh["stats"]), "trained": torch.tensor(True)}
    down = algorithm.publish(task, algorithm.init_server(task), np.arange(1))
    stats = algorithm.adapt(task, client, down, comparisons.data_of({}))["stats"]
    assert comparisons.same(stats, tree.map(lambda leaf: leaf + (0.5 if bn == "average" else 2.0), fresh["stats"]))


def test_beta_learns_with_the_mixed_statistics_and_leaves_them_as_they_are():
    task, batch, algorithm = comparisons.with_batch_norm(), small_task.batch(0), PFedAFE()
    fresh = algorithm.init_client(task)
    own = tree.map(lambda leaf: leaf * 1.5 + 0.1, {"body": fresh["body"], "stats": fresh["stats"]})
    client = {**fresh, **own, "trained": torch.tensor(True)}
    before, shared = tree.clone(client), algorithm.init_server(task)["shared"]
    beta = algorithm.mixing_ratio(task, client, shared, comparisons.data_of({"beta": [batch]}))

    def loss(beta):
        weights = mixed(client, {"body": shared["body"]}, torch.tensor(beta))
        stats = mixed(client, shared, torch.tensor(0.5))["stats"]  # no derivative by these
        model = tree.map(Tensor.double, {**weights, "stats": stats})
        z = task.architecture.features(model, batch.x.double(), training=False)
        return float(cross_entropy(task.architecture.logits(model["head"], z), batch))

    # 1e-4: a central difference, of weights that are mixed in single precision.
    assert float(beta) == pytest.approx(0.5 - 0.1 * (loss(0.501) - loss(0.499)) / 0.002, abs=1e-4)
    assert abs(float(beta) - 0.5) > 0.005 and comparisons.same(client, before)


def test_a_step_of_padding_alone_changes_nothing():
    comparisons.check_padding(PFedAFE(), client_of(comparisons.model(2)), shared_body(1), ("train", "beta"))


@pytest.mark.parametrize("name, value", [("beta_init", 1.1), ("beta_init", -0.1), ("beta_steps", 0), ("beta_lr", 0.0)])
def test_values_without_meaning_are_refused(name, value):
    with pytest.raises(ValidationError, match=name):
        TypeAdapter(PFedAFE).validate_python({name: value})
