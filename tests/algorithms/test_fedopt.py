"""Optimizers on the server: their rules over rounds, in NumPy."""

import numpy as np
import pytest
import torch

import comparisons
import small_task
from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi

TAU = 0.01


def squares(name, v, d):
    """v after a change d, as algorithm 2 of Reddi et al. writes it."""
    return {
        "adagrad": v + d**2,
        "yogi": v - (1 - 0.9) * d**2 * np.sign(v - d**2),
        "adam": 0.9 * v + (1 - 0.9) * d**2,
    }[name]


@pytest.mark.parametrize(
    "name, algorithm",
    [
        ("adagrad", FedAdagrad(server_lr=0.3, beta1=0.4, tau=TAU)),
        ("yogi", FedYogi(server_lr=0.3, beta1=0.4, beta2=0.9, tau=TAU)),
        ("adam", FedAdam(server_lr=0.3, beta1=0.4, beta2=0.9, tau=TAU)),
    ],
)
def test_three_rounds_are_those_of_algorithm_2(name, algorithm):
    task = small_task.task()
    server = algorithm.init_server(task)
    x = small_task.to_numpy(server["model"])
    m, v = {key: np.zeros_like(value) for key, value in x.items()}, {key: np.full_like(x[key], TAU**2) for key in x}
    for seed in range(3):
        sent = comparisons.model(seed)
        server = algorithm.server_update(task, server, {"model": sent}, Round(seed + 1, np.arange(2), 0))
        y = small_task.to_numpy(sent)
        for key in x:
            d = y[key] - x[key]
            m[key], v[key] = 0.4 * m[key] + 0.6 * d, squares(name, v[key], d)
            x[key] = x[key] + 0.3 * m[key] / (np.sqrt(v[key]) + TAU)
        small_task.assert_close(server["model"], x, 1e-5)
    assert algorithm.uplink(task)["model"].by == "clients"


def test_server_momentum_is_that_of_the_paper():
    task, algorithm = small_task.task(), FedAvgM(server_lr=0.7, server_momentum=0.8)
    server = algorithm.init_server(task)
    w = small_task.to_numpy(server["model"])
    v = {name: np.zeros_like(value) for name, value in w.items()}
    for seed in range(3):
        sent = comparisons.model(seed)
        server = algorithm.server_update(task, server, {"model": sent}, Round(seed + 1, np.arange(2), 0))
        y = small_task.to_numpy(sent)
        v = {name: 0.8 * v[name] + y[name] - w[name] for name in w}
        w = {name: w[name] + 0.7 * v[name] for name in w}
        small_task.assert_close(server["model"], w)
    assert algorithm.uplink(task)["model"].by == "samples"


@pytest.mark.parametrize("algorithm", [FedAvgM(), FedAdam()])
def test_batch_norm_statistics_are_averaged_and_nothing_else(algorithm):
    task = comparisons.with_batch_norm()
    server = algorithm.init_server(task)
    sent = tree.map(lambda leaf: leaf + 1, server["model"])
    new = algorithm.server_update(task, server, {"model": sent}, Round(1, np.arange(2), 0))
    assert comparisons.same(new["model"]["stats"], sent["stats"])
    assert all("stats" not in new[name] for name in new if name != "model")
    assert not torch.equal(new["model"]["head"]["weight"], server["model"]["head"]["weight"])
