"""FedNova: directions by numbers of gradients, whose mean the server follows."""

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
from pflmpi.algorithms.fednova import FedNova
from pflmpi.errors import ConfigError
from pflmpi.messages.kinds import Mean

LR = 0.1


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_a_round_is_equation_12(rho):
    """Two clients with one and three steps, and three times as many samples."""
    task, algorithm, received = small_task.task(momentum=rho), FedNova(), comparisons.model(1)
    x, ends, norms, ups = small_task.to_numpy(received), [], [], []
    for batches in ([small_task.batch(0)], [small_task.batch(seed) for seed in (1, 2, 3)]):
        _, up = algorithm.client_update(task, {}, {"model": received}, small_task.data(batches, LR))
        y, velocity, coefficients = x, dict.fromkeys(x, 0.0), np.zeros(0)
        for batch in batches:
            slopes = numpy_network.gradients(y, *small_task.flat(batch))
            velocity = {name: rho * velocity[name] + slopes[name] for name in y}
            y = {name: y[name] - LR * velocity[name] for name in y}
            # How often each gradient so far has been added by this step.
            coefficients = np.append(coefficients, 0.0) + rho ** np.arange(len(coefficients), -1, -1.0)
        ends.append(y)
        norms.append(coefficients.sum())
        ups.append(up["steps"])
        assert abs(float(up["steps"]["gradients"]) - norms[-1]) < 1e-5
        small_task.assert_close(algorithm.after_training(task, {"model": received}, up)["model"], y, 1e-5)
    shares = [0.25, 0.75]
    mean = tree.map(lambda a, b: shares[0] * a + shares[1] * b, *ups)
    model = algorithm.server_update(task, {"model": received}, {"steps": mean}, Round(1, np.arange(2), 0))["model"]
    together = sum(share * norm for share, norm in zip(shares, norms, strict=True))
    expected = {
        name: x[name]
        - together * sum(share * (x[name] - y[name]) / norm for share, y, norm in zip(shares, ends, norms, strict=True))
        for name in x
    }
    small_task.assert_close(model, expected, 1e-5)


def test_means_are_by_samples_and_of_directions_steps_and_statistics_alone():
    plain, normed = (FedNova().uplink(task) for task in (small_task.task(), comparisons.with_batch_norm()))
    assert isinstance(plain["steps"], Mean) and plain["steps"].by == "samples"
    assert set(plain["steps"].like) == {"direction", "gradients"}
    assert set(normed["steps"].like) == {"direction", "gradients", "stats"}


@pytest.mark.parametrize("bn", ["average", "local"])
def test_statistics_and_state_are_those_of_fedavg(bn):
    task, data = comparisons.with_batch_norm(bn=bn), small_task.data([small_task.batch(0)])
    down = FedAvg().publish(task, FedAvg().init_server(task), np.arange(1))
    client = FedAvg().init_client(task)
    state, up = FedNova().client_update(task, client, down, data)
    fedavg_state, sent = FedAvg().client_update(task, client, down, data)
    assert comparisons.same(state, fedavg_state)
    if bn == "average":
        assert comparisons.same(up["steps"]["stats"], sent["model"]["stats"])


@pytest.mark.parametrize(
    "training", [{"optimizer": "adam"}, {"momentum": 0.9, "keep_optimizer": True}], ids=["adam", "kept"]
)
def test_steps_of_unknown_length_are_refused(training, tmp_path):
    raw = quick_run.settings(algorithm={"name": "fednova"}, training=training)
    with pytest.raises(ConfigError, match=r"FedNova knows how many gradients the steps of SGD add up to"):
        quick_run.run(raw, tmp_path / "run")


def test_lanes_and_a_client_without_steps():
    comparisons.check_lanes(small_task.task(), FedNova(), {}, {"model": comparisons.model(1)}, ("train",))
    _, up = FedNova().client_update(
        small_task.task(), {}, {"model": comparisons.model(1)}, comparisons.data_of({"train": []})
    )
    assert all(not leaf.any() for _, leaf in tree.leaves(up["steps"])) and not torch.isnan(up["steps"]["gradients"])
