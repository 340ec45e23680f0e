"""Clients are spread over ranks by a cost that is known before the run; results do not depend on it."""

import numpy as np
import pytest

import quick_run
from every_algorithm import every_algorithm
from pflmpi.config import load as configuration
from pflmpi.errors import ConfigError
from pflmpi.experiment.build import prepare, setup
from pflmpi.learning.task import HOST

LIGHT, HEAVY = {"name": "mlp", "hidden": 16}, {"name": "cnn", "hidden": 16, "kernel": 3, "padding": 1}


@pytest.mark.parametrize("name", ["fedproto", "fedavg"])
def test_clients_with_large_models_are_spread_from_the_first_round_on_and_bits_are_the_same(name, tmp_path):
    raw = quick_run.settings(
        every_algorithm()[name],
        partition={"name": "iid", "clients": 4},
        model=[HEAVY, LIGHT] if name == "fedproto" else LIGHT,
        training={"rounds": 2, "participation": 1.0, "steps": 1},
        runtime={"executor": "loop"},
    )
    placement = setup(prepare(configuration.parse(raw), HOST), 2, 2).placement
    assert (placement.home is None) == (name == "fedavg")
    clients = [np.concatenate(groups).tolist() for groups in placement.assign(np.arange(4))]
    assert clients == ([[0, 1], [2, 3]] if name == "fedproto" else [[0, 2], [1, 3]]), "0 and 2 have the large model"
    heavy, light = placement.work[:2]
    assert heavy > 5 * light if name == "fedproto" else heavy == light
    assert quick_run.run(raw, tmp_path / "one") == quick_run.run(raw, tmp_path / "two", 2)


def test_the_key_of_measured_balance_is_refused():
    with pytest.raises(ConfigError, match=r"runtime\.balance is no key any more: clients are spread over ranks by"):
        configuration.parse(quick_run.settings(runtime={"balance": "samples"}))
