"""MOON: the contrast of features, from equation 3."""

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import quick_run
import small_task
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.moon import Moon
from pflmpi.errors import ConfigError

LR, MU, TAU = 0.1, 0.7, 0.4


def similarity_slope(z, reference):
    """The cosine similarity of rows, and its gradient by z."""
    length, reach = np.linalg.norm(z, axis=1, keepdims=True), np.linalg.norm(reference, axis=1, keepdims=True)
    sim = (z * reference).sum(1, keepdims=True) / (length * reach)
    return sim, reference / (length * reach) - sim * z / length**2


def test_a_step_is_that_of_equation_3():
    task, batch = small_task.task(), small_task.batch(0)
    received, last = comparisons.model(1), comparisons.model(2)
    client = {"last": {"body": last["body"]}, "trained": torch.tensor(1.0)}
    second = small_task.batch(1)
    state, up = Moon(contrast_weight=MU, temperature=TAU).client_update(
        task, client, {"model": received}, small_task.data([batch, second], LR)
    )
    w, anchor, before = map(small_task.to_numpy, (received, received, last))
    for minibatch in (batch, second):
        x, y = small_task.flat(minibatch)
        z, near, far = (numpy_network.forward(weights, x)[0] for weights in (w, anchor, before))
        (s_near, d_near), (s_far, d_far) = similarity_slope(z, near), similarity_slope(z, far)
        share = np.exp(s_far / TAU) / (np.exp(s_near / TAU) + np.exp(s_far / TAU))
        extra = MU * share * (d_far - d_near) / TAU / len(y)
        slopes = numpy_network.gradients(w, x, y, extra)
        w = {name: w[name] - LR * slopes[name] for name in w}
    small_task.assert_close(up["model"], w, 1e-5)
    assert comparisons.same(state["last"], {"body": up["model"]["body"]}) and state["trained"] == 1


@pytest.mark.parametrize("weight, trained", [(0.0, 1.0), (5.0, 0.0)])
def test_without_contrast_it_is_fedavg(weight, trained):
    """With weight 0, and for a client that takes part for the first time."""
    task, data, received = small_task.task(), small_task.data([small_task.batch(0)]), comparisons.model(1)
    client = {"last": {"body": comparisons.model(2)["body"]}, "trained": torch.tensor(trained)}
    _, moon_up = Moon(contrast_weight=weight).client_update(task, client, {"model": received}, data)
    _, fedavg_up = FedAvg().client_update(task, {}, {"model": received}, data)
    for path, value in small_task.to_numpy(moon_up["model"]).items():
        np.testing.assert_allclose(value, small_task.to_numpy(fedavg_up["model"])[path], rtol=0, atol=1e-6)


def test_a_model_without_features_to_contrast_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"MOON contrasts features of a body .* model logistic has none"):
        quick_run.run(quick_run.settings(algorithm={"name": "moon"}, model="logistic"), tmp_path / "run")


def test_the_last_model_is_the_one_that_training_left():
    task, algorithm = small_task.task(), Moon()
    client = algorithm.init_client(task)
    assert client["trained"] == 0 and algorithm.averaged_by() == "samples"
    state, up = algorithm.client_update(
        task, client, {"model": comparisons.model(1)}, small_task.data([small_task.batch(0)])
    )
    assert comparisons.same(state["last"], {"body": up["model"]["body"]})


@pytest.mark.parametrize("bn", ["average", "local"])
def test_other_models_are_in_evaluation_mode(bn):
    task, algorithm = comparisons.with_batch_norm(bn=bn), Moon()
    client = {**algorithm.init_client(task), "trained": torch.tensor(1.0)}
    down = algorithm.publish(task, algorithm.init_server(task), np.arange(1))
    kept = {name: leaf.clone() for name, leaf in client["last"]["stats"].items()}
    state, _ = algorithm.client_update(task, client, down, small_task.data([small_task.batch(0)]))
    assert all(torch.equal(client["last"]["stats"][name], leaf) for name, leaf in kept.items())
    assert not comparisons.same(state["last"]["stats"], kept) and ("stats" in state) == (bn == "local")


def test_lanes():
    client = {"last": {"body": comparisons.model(2)["body"]}, "trained": torch.tensor(1.0)}
    comparisons.check_lanes(small_task.task(), Moon(), client, {"model": comparisons.model(1)}, ("train",))
