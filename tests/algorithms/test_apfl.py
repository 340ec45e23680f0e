"""APFL: the global model is FedAvg's; the personal one mixes it with the client's own, parameter by parameter."""

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import small_task
from pflmpi import tree
from pflmpi.algorithms.apfl import APFL

LR = 0.1


def client_of(own, alpha):
    return {"own": own, "alpha": torch.tensor(alpha)}


def mixed_by_hand(v, w, alpha):
    return {name: alpha * v[name] + (1 - alpha) * w[name] for name in v}


def alpha_by_hand(v, w, alpha, batch, lr):
    """Equation 10, clamped."""
    slopes = numpy_network.gradients(mixed_by_hand(v, w, alpha), *small_task.flat(batch))
    return min(max(alpha - lr * sum((slopes[name] * (v[name] - w[name])).sum() for name in v), 0.0), 1.0)


def round_by_hand(v, w, alpha, batches):
    """Algorithm 1: both steps from the values before the minibatch, by the chain rule."""
    for batch in batches:
        at_mix = numpy_network.gradients(mixed_by_hand(v, w, alpha), *small_task.flat(batch))
        at_w = numpy_network.gradients(w, *small_task.flat(batch))
        v = {name: v[name] - LR * alpha * at_mix[name] for name in v}
        w = {name: w[name] - LR * at_w[name] for name in w}
    return v, w


BATCHES = [small_task.batch(0), small_task.batch(1), small_task.batch(2)]


@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.0])
def test_both_models_step_from_the_values_before_the_minibatch(alpha):
    own, received = comparisons.model(2), comparisons.model(1)
    state, up = APFL(adaptive=False).client_update(
        small_task.task(), client_of(own, alpha), {"model": received}, small_task.data(BATCHES, LR)
    )
    v, w = round_by_hand(small_task.to_numpy(own), small_task.to_numpy(received), alpha, BATCHES)
    small_task.assert_close(state["own"], v)
    small_task.assert_close(up["model"], w)
    assert float(state["alpha"]) == pytest.approx(alpha) and list(up) == ["model"]


def test_v_does_not_follow_its_own_loss_and_is_not_overwritten_by_the_mix_after_the_round():
    """Departures of a public implementation."""
    own, received = comparisons.model(2), comparisons.model(1)
    state, up = APFL(adaptive=False).client_update(
        small_task.task(), client_of(own, 0.5), {"model": received}, small_task.data(BATCHES[:1], LR)
    )
    v = small_task.to_numpy(own)
    slopes = numpy_network.gradients(v, *small_task.flat(BATCHES[0]))
    alone = {name: v[name] - LR * slopes[name] for name in v}
    trained, sent = small_task.to_numpy(state["own"]), small_task.to_numpy(up["model"])
    assert np.abs(trained["W2"] - alone["W2"]).max() > 1e-3
    assert np.abs(trained["W2"] - mixed_by_hand(trained, sent, 0.5)["W2"]).max() > 0.1


@pytest.mark.parametrize("own, received, alpha_lr", [(4, 1, None), (4, 1, 0.03), (4, 1, 80.0), (1, 4, 80.0)])
def test_alpha_takes_one_plain_clamped_step_on_the_first_minibatch_of_a_round(own, received, alpha_lr):
    client, down = client_of(comparisons.model(own), 0.4), {"model": comparisons.model(received)}
    task = small_task.task(momentum=0.9, weight_decay=0.5)
    state, _ = APFL(alpha_lr=alpha_lr).client_update(task, client, down, small_task.data(BATCHES, LR))
    v, w = small_task.to_numpy(client["own"]), small_task.to_numpy(down["model"])
    expected = alpha_by_hand(v, w, 0.4, BATCHES[0], LR if alpha_lr is None else alpha_lr)
    assert float(state["alpha"]) == pytest.approx(expected, abs=1e-6) and abs(expected - 0.4) > 0.01
    if alpha_lr == 80.0:
        assert float(state["alpha"]) == (0.0 if own == 4 else 1.0)


def test_a_round_trains_with_its_new_alpha():
    own, received = comparisons.model(4), comparisons.model(1)
    state, up = APFL().client_update(
        small_task.task(), client_of(own, 0.4), {"model": received}, small_task.data(BATCHES, LR)
    )
    v, w = small_task.to_numpy(own), small_task.to_numpy(received)
    v, w = round_by_hand(v, w, alpha_by_hand(v, w, 0.4, BATCHES[0], LR), BATCHES)
    small_task.assert_close(state["own"], v)
    small_task.assert_close(up["model"], w)


def test_a_learning_rate_of_its_own_decays_with_the_others():
    own, received, task = comparisons.model(4), comparisons.model(1), small_task.task(lr_decay=0.5)
    data = comparisons.data_of({"train": BATCHES}, LR, round=3, decay=0.25)
    state, _ = APFL(alpha_lr=0.2).client_update(task, client_of(own, 0.4), {"model": received}, data)
    expected = alpha_by_hand(small_task.to_numpy(own), small_task.to_numpy(received), 0.4, BATCHES[0], 0.2 / 4)
    assert float(state["alpha"]) == pytest.approx(expected, abs=1e-6)


def test_a_round_without_minibatches_changes_nothing():
    client, down = client_of(comparisons.model(2), 0.4), {"model": comparisons.model(1)}
    state, up = APFL().client_update(small_task.task(), client, down, comparisons.data_of({"train": []}))
    assert comparisons.same(state, client) and comparisons.same(up["model"], down["model"])


def test_the_fresh_global_model_is_mixed_in_for_prediction():
    own, fresh, x = comparisons.model(2), comparisons.model(5), small_task.batch(9).x
    scores = APFL().predict(small_task.task(), client_of(own, 0.3), {"model": fresh}, x)
    w = mixed_by_hand(small_task.to_numpy(own), small_task.to_numpy(fresh), 0.3)
    np.testing.assert_allclose(scores, numpy_network.forward(w, x.flatten(1).double().numpy())[1], atol=1e-5)


@pytest.mark.parametrize("bn", ["average", "local"])
def test_statistics_of_each_model_follow_its_own_passes_once_per_minibatch(bn):
    task, batches = comparisons.with_batch_norm(bn=bn), BATCHES[:1]
    received = APFL().publish(task, APFL().init_server(task), np.arange(1))
    client = APFL(alpha=1.0).init_client(task)
    fixed, up = APFL(adaptive=False).client_update(task, client, received, comparisons.data_of({"train": batches}))
    learned, _ = APFL().client_update(task, client, received, comparisons.data_of({"train": batches}))
    assert ("stats" in up["model"]) == (bn == "average") and ("stats" in fixed) == (bn == "local")
    expected = tree.clone(task.init())
    task.predict(expected, batches[0].x, training=True)
    # All models start alike, so their one pass over the minibatch moves all statistics alike.
    shared = up["model"] if bn == "average" else fixed
    for model in (fixed["own"], learned["own"], shared):
        assert comparisons.same(model["stats"], expected["stats"])
    assert not comparisons.same(expected["stats"], client["own"]["stats"]) and tree.differences(fixed, client) == []


@pytest.mark.parametrize("bn", ["average", "local"])
def test_statistics_are_mixed_for_prediction(bn):
    task, x = comparisons.with_batch_norm(bn=bn), small_task.batch(9).x
    model = task.init()
    own, fresh = (tree.map(lambda leaf, by=by: leaf + by, model) for by in (0.2, 0.6))
    client, down = client_of(own, 0.25), {"model": fresh}
    if bn == "local":
        client["stats"], down["model"] = fresh["stats"], {"body": fresh["body"], "head": fresh["head"]}
    expected = task.predict(tree.map(lambda leaf: leaf + 0.5, model), x)
    torch.testing.assert_close(APFL().predict(task, client, down, x), expected, rtol=0, atol=1e-5)


def test_a_step_of_padding_alone_changes_nothing():
    comparisons.check_padding(APFL(), client_of(comparisons.model(2), 0.4), {"model": comparisons.model(1)}, ("train",))
