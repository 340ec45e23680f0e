"""SCAFFOLD: corrected steps, control variates of both options, and what the server makes of them."""

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import quick_run
import small_task
from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.scaffold import Scaffold
from pflmpi.errors import ConfigError
from pflmpi.learning.client import model_loss
from pflmpi.learning.local_training import LocalTraining

LR = 0.1


@pytest.mark.parametrize("control", ["steps", "gradient"])
def test_steps_and_control_variates_are_those_of_algorithm_1(control):
    task, batches = small_task.task(), [small_task.batch(seed) for seed in (0, 1, 2)]
    received, own, shared = (comparisons.model(seed) for seed in (1, 2, 3))
    data = comparisons.data_of({"train": batches, "gradient": batches}, LR)
    down = {"model": received, "control": shared}
    state, up = Scaffold(control=control).client_update(task, {"control": own}, down, data)

    x, own_control, all = small_task.to_numpy(received), small_task.to_numpy(own), small_task.to_numpy(shared)
    y = x
    for batch in batches:
        slopes = numpy_network.gradients(y, *small_task.flat(batch))
        y = {name: y[name] - LR * (slopes[name] - own_control[name] + all[name]) for name in y}
    if control == "steps":
        new = {name: own_control[name] - all[name] + (x[name] - y[name]) / (3 * LR) for name in y}
    else:
        images, labels = zip(*map(small_task.flat, batches), strict=True)
        new = numpy_network.gradients(x, np.concatenate(images), np.concatenate(labels))
    small_task.assert_close(up["model"], y)
    small_task.assert_close(state["control"], new, 1e-5)  # a difference of weights over K eta
    small_task.assert_close(up["change"], {name: new[name] - own_control[name] for name in new}, 1e-5)


def test_option_ii_is_the_mean_gradient_of_the_steps():
    """What the paper has it for: with c and c_i as they were, the correction is gone in expectation."""
    task, batches, received = small_task.task(), [small_task.batch(0), small_task.batch(1)], comparisons.model(1)
    zeros = tree.map(torch.zeros_like, received)
    down = {"model": received, "control": zeros}
    state, _ = Scaffold().client_update(task, {"control": zeros}, down, small_task.data(batches, LR))
    w, total = small_task.to_numpy(received), None
    for batch in batches:
        slopes = numpy_network.gradients(w, *small_task.flat(batch))
        w = {name: w[name] - LR * slopes[name] for name in w}
        total = slopes if total is None else {name: total[name] + slopes[name] for name in w}
    small_task.assert_close(state["control"], {name: value / 2 for name, value in total.items()}, 1e-5)


@pytest.mark.parametrize("server_lr", [1.0, 0.3])
def test_the_server_moves_by_the_mean_change_and_c_by_the_sum_over_all_clients(server_lr):
    task, algorithm = small_task.task(clients=8), Scaffold(server_lr=server_lr)
    old, control, mean, changes = (comparisons.model(seed) for seed in range(4))
    new = algorithm.server_update(
        task, {"model": old, "control": control}, {"model": mean, "change": changes}, Round(1, np.arange(2), 0)
    )
    x, y, c, d = map(small_task.to_numpy, (old, mean, control, changes))
    small_task.assert_close(new["model"], {name: x[name] + server_lr * (y[name] - x[name]) for name in x})
    small_task.assert_close(new["control"], {name: c[name] + d[name] / 8 for name in c})
    assert algorithm.uplink(task)["model"].by == "clients"


def test_without_control_variates_the_first_model_is_that_of_fedavg():
    task, data, received = small_task.task(), small_task.data([small_task.batch(0), small_task.batch(1)]), None
    algorithm = Scaffold()
    server = algorithm.init_server(task)
    received = algorithm.publish(task, server, np.arange(1))
    _, scaffold_up = algorithm.client_update(task, algorithm.init_client(task), received, data)
    _, fedavg_up = FedAvg().client_update(task, {}, {"model": received["model"]}, data)
    assert comparisons.same(scaffold_up["model"], fedavg_up["model"])


def test_the_mean_of_all_control_variates_is_c_when_everybody_takes_part(tmp_path):
    raw = quick_run.settings(algorithm={"name": "scaffold"}, training={"participation": 1.0})
    quick_run.run(raw, tmp_path / "run")
    state = comparisons.state_of(tmp_path / "run")
    for path in [path for path in state if path.startswith("server/control/")]:
        own = state[path.replace("server/control/", "clients/control/")].astype(np.float64).mean(0)
        np.testing.assert_allclose(state[path], own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("training", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_steps_that_are_no_mean_of_gradients_are_refused(training, tmp_path):
    raw = quick_run.settings(algorithm={"name": "scaffold"}, training=training)
    with pytest.raises(ConfigError, match=r"SCAFFOLD takes the sum of a client's steps for one of its gradients"):
        quick_run.run(raw, tmp_path / "run")


def test_the_training_loss_is_the_plain_one_without_the_correction():
    task, batch = small_task.task(), small_task.batch(0)
    received, control = comparisons.model(1), comparisons.model(2)
    data = comparisons.data_of({"train": [batch]}, LR)
    local = LocalTraining(None, ())
    down = {"model": received, "control": comparisons.model(3)}
    Scaffold().client_update(task.replace(local=local), {"control": control}, down, data)
    assert local.mean_loss(batch.x) == model_loss(task)(received, batch)


@pytest.mark.parametrize("control", ["steps", "gradient"])
def test_a_client_without_steps_changes_nothing_of_its_own(control):
    task, own = small_task.task(), comparisons.model(2)
    data = comparisons.data_of({"train": [], "gradient": []}, LR)
    down = {"model": comparisons.model(1), "control": comparisons.model(3)}
    state, up = Scaffold(control=control).client_update(task, {"control": own}, down, data)
    assert comparisons.same(up["model"], down["model"])
    assert comparisons.same(state["control"], own) if control == "steps" else not state["control"]["head"]["bias"].any()


@pytest.mark.parametrize("control", ["steps", "gradient"])
def test_lanes_have_the_steps_of_the_loop(control):
    zeros = tree.map(torch.zeros_like, comparisons.model(1))
    down, client = {"model": comparisons.model(1), "control": zeros}, {"control": comparisons.model(2)}
    comparisons.check_lanes(small_task.task(), Scaffold(control=control), client, down, ("train", "gradient"))


@pytest.mark.parametrize("bn", ["average", "local"])
def test_batch_norm_statistics_have_no_control_variate(bn):
    task, algorithm = comparisons.with_batch_norm(bn=bn), Scaffold(control="gradient")
    client = algorithm.init_client(task)
    down = algorithm.publish(task, algorithm.init_server(task), np.arange(1))
    state, up = algorithm.client_update(
        task, client, down, comparisons.data_of({name: [small_task.batch(0)] for name in ("train", "gradient")})
    )
    assert set(state["control"]) == {"body", "head"} and ("stats" in state) == (bn == "local")
    _, sent = FedAvg().client_update(
        task, FedAvg().init_client(task), {"model": down["model"]}, small_task.data([small_task.batch(0)])
    )
    assert comparisons.same(up["model"], sent["model"])
