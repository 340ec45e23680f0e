"""Per-FedAvg: the meta-gradient in its two forms, and the adaptation that is scored and not kept."""

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import quick_run
import small_task
from pflmpi import tree
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.perfedavg import PerFedAvg
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Mean

ALPHA, BETA = 0.3, 0.1
NAMES = ("inner", "train", "hessian")


def slope(w, batch):
    return numpy_network.gradients(w, *small_task.flat(batch))


def moved(w, direction, lr):
    return {name: w[name] - lr * direction[name] for name in w}


def trained(algorithm, passes, round=1, **training):
    """What a client sends after receiving `comparisons.model(1)`; of the passes it gets those that it asks for."""
    task = small_task.task(**training)
    used_passes = {name: batches for name, batches in passes.items() if name in algorithm.passes(task, round)}
    state, up = algorithm.client_update(
        task,
        {},
        {"model": comparisons.model(1)},
        comparisons.data_of(used_passes, BETA, round, task.training.decay(round)),
    )
    assert state == {}
    return up["model"]


def test_first_order_steps_with_the_gradient_at_the_adapted_weights():
    passes = {"inner": [small_task.batch(0), small_task.batch(1)], "train": [small_task.batch(2), small_task.batch(3)]}
    w = small_task.to_numpy(comparisons.model(1))
    for inner, outer in zip(passes["inner"], passes["train"], strict=True):
        w = moved(w, slope(moved(w, slope(w, inner), ALPHA), outer), BETA)
    small_task.assert_close(trained(PerFedAvg(inner_lr=ALPHA), passes), w)


def test_hessian_free_subtracts_a_difference_of_gradients_on_a_third_minibatch():
    # A wide difference, so that float32 gradients suffice to tell the formula's parts from each other.
    delta, passes = 0.05, {name: [small_task.batch(i), small_task.batch(i + 3)] for i, name in enumerate(NAMES)}
    w = small_task.to_numpy(comparisons.model(1))
    for inner, outer, hessian in zip(*passes.values(), strict=True):
        v = slope(moved(w, slope(w, inner), ALPHA), outer)
        ahead, behind = slope(moved(w, v, -delta), hessian), slope(moved(w, v, delta), hessian)
        w = moved(w, {name: v[name] - ALPHA * (ahead[name] - behind[name]) / (2 * delta) for name in v}, BETA)
    algorithm = PerFedAvg(order="hessian_free", inner_lr=ALPHA, difference=delta)
    small_task.assert_close(trained(algorithm, passes), w)
    first = small_task.to_numpy(trained(PerFedAvg(inner_lr=ALPHA), passes))
    assert np.abs(first["W2"] - w["W2"]).max() > 1e-3, "the third minibatch matters"


def test_hessian_free_follows_the_gradient_of_the_meta_objective():
    """On one minibatch alone, F(w) = f(w - alpha grad f(w)) is differentiated by nudging each weight."""
    batch = small_task.batch(0)
    x, y = small_task.flat(batch)

    def objective(w):
        _, scores = numpy_network.forward(moved(w, slope(w, batch), ALPHA), x)
        return float(-np.log(numpy_network.softmax(scores)[np.arange(len(y)), y]).mean())

    w = small_task.to_numpy(comparisons.model(1))
    expected = {name: np.zeros_like(value) for name, value in w.items()}
    for name, value in w.items():
        for place in np.ndindex(value.shape):
            nudge = np.zeros_like(value)
            nudge[place] = 1e-6
            pair = [objective({**w, name: value + sign * nudge}) for sign in (1, -1)]
            expected[name][place] = (pair[0] - pair[1]) / 2e-6
    passes = {name: [batch] for name in NAMES}
    sent = small_task.to_numpy(trained(PerFedAvg(order="hessian_free", inner_lr=ALPHA), passes))
    for name in w:
        # 1e-3: float32 gradients differ by 1e-7, over a difference of 2e-3.
        np.testing.assert_allclose((w[name] - sent[name]) / BETA, expected[name], atol=1e-3)
    first = small_task.to_numpy(trained(PerFedAvg(inner_lr=ALPHA), passes))
    assert np.abs((w["W2"] - first["W2"]) / BETA - expected["W2"]).max() > 1e-2, "first order does not"


def test_the_outer_rate_is_that_of_training_and_alpha_does_not_decay():
    passes = {"inner": [small_task.batch(0)], "train": [small_task.batch(1)]}
    later = trained(PerFedAvg(inner_lr=ALPHA), passes, round=5, lr_decay=0.5)
    assert comparisons.same(later, trained(PerFedAvg(inner_lr=ALPHA), passes))


def test_the_minibatches_are_from_passes_of_one_length_and_few_adapt():
    task = small_task.task()
    assert PerFedAvg().passes(task, 1) == {"inner": Pass(), "train": Pass(), "adapt": Pass(steps=1)}
    more = PerFedAvg(order="hessian_free", adapt_steps=3).passes(task, 1)
    assert more == {"inner": Pass(), "train": Pass(), "hessian": Pass(), "adapt": Pass(steps=3)}


def test_what_is_scored_are_the_weights_after_a_step_on_training_samples():
    """Elsewhere the step is on test samples, or its result is not what the forward pass uses."""
    task, algorithm = small_task.task(momentum=0.9, weight_decay=0.3), PerFedAvg(inner_lr=ALPHA, adapt_steps=2)
    received, batches, x = comparisons.model(1), [small_task.batch(0), small_task.batch(1)], small_task.batch(7).x
    adapted = algorithm.adapt(task, {}, {"model": received}, comparisons.data_of({"adapt": batches}))
    w = small_task.to_numpy(received)
    for batch in batches:
        w = moved(w, slope(w, batch), ALPHA)
    _, scores = numpy_network.forward(w, x.flatten(1).double().numpy())
    logits = algorithm.predict(task, adapted, {"model": received}, x)
    np.testing.assert_allclose(logits, scores, atol=1e-5)
    assert algorithm.adapts_with == ("adapt",) and comparisons.same(received, comparisons.model(1))
    assert (logits - task.predict(received, x)).abs().max() > 1e-2


def test_adaptation_is_not_kept(tmp_path):
    digests = [
        quick_run.run(
            quick_run.settings(algorithm={"name": "perfedavg", "inner_lr": 0.5}, evaluation={"every": every}),
            tmp_path / str(every),
        )
        for every in (1, 3)
    ]
    assert digests[0] == digests[1]


def test_a_client_with_fewer_samples_than_a_minibatch_trains_and_is_adapted():
    """Elsewhere minibatches that are not full are left out, and such a client has none."""
    few = {name: [small_task.batch(i, 1)] for i, name in enumerate(("inner", "train", "adapt"))}
    assert not comparisons.same(trained(PerFedAvg(), few), comparisons.model(1))
    adapted = PerFedAvg().adapt(small_task.task(), {}, {"model": comparisons.model(1)}, comparisons.data_of(few))
    assert not comparisons.same(adapted, comparisons.model(1))


@pytest.mark.parametrize("bn", ["average", "local"])
@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_batch_norm_statistics_follow_the_adapted_weights_alone(order, bn):
    task = comparisons.with_batch_norm(bn=bn)
    algorithm = PerFedAvg(order=order, inner_lr=ALPHA)
    server, client = algorithm.init_server(task), algorithm.init_client(task)
    down = algorithm.publish(task, server, np.arange(4))
    names = (*NAMES, "adapt") if order == "hessian_free" else (*NAMES[:2], "adapt")
    data = comparisons.data_of({name: [small_task.batch(i)] for i, name in enumerate(names)}, BETA)
    state, up = algorithm.client_update(task, client, down, data)
    model = {**down["model"], **client}
    assert comparisons.same(model, task.init()), "neither what came nor what was kept is touched"
    stats = {**up["model"], **state}["stats"]
    assert ("stats" in state) == (bn == "local") and ("stats" in up["model"]) == (bn == "average")

    # One pass through w' = w - alpha grad f(w; D), on D': a tenth of the way to its mean.
    z = model["body"]["weight"].clone().requires_grad_(True)
    loss = torch.nn.functional.cross_entropy(
        task.predict(
            {**model, "body": {"weight": z}, "stats": tree.clone(model["stats"])}, small_task.batch(0).x, True
        ),
        small_task.batch(0).y,
    )
    weight = z.detach() - ALPHA * torch.autograd.grad(loss, z)[0]
    mean = (small_task.batch(1).x.flatten(1) @ weight.mT).mean(0)
    torch.testing.assert_close(stats["mean"], 0.1 * mean)

    algorithm.adapt(task, client, down, data)
    assert comparisons.same({**down["model"], **client}, task.init()), "adapting touches nothing either"


def test_the_mean_is_plain_unless_asked():
    task = small_task.task()
    assert PerFedAvg().uplink(task) == {"model": Mean(task.like("body", "head"), by="clients")}
    assert FedAvg().uplink(task) == PerFedAvg(weighting="samples").uplink(task)


@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_padding_alone_changes_nothing(order):
    algorithm = PerFedAvg(order=order)
    comparisons.check_padding(
        algorithm, {}, {"model": comparisons.model(1)}, NAMES if order == "hessian_free" else NAMES[:2]
    )
