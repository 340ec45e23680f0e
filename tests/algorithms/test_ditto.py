"""Ditto: the global model is FedAvg's, the personal one is drawn to it and is what counts."""

import csv

import numpy as np
import pytest
import torch

import comparisons
import numpy_network
import quick_run
import small_task
from pflmpi import tree
from pflmpi.algorithms.ditto import Ditto
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.local_only import Local
from pflmpi.errors import ConfigError
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import Mean

LR = 0.1


def test_the_personal_model_is_drawn_to_the_global_one_as_it_was_received():
    task, batches = small_task.task(), [small_task.batch(0), small_task.batch(1)]
    received, own = comparisons.model(1), comparisons.model(2)
    state, up = Ditto(prox_weight=0.7).client_update(
        task, {"personal": own}, {"model": received}, small_task.data(batches, LR)
    )
    w, v, anchor = small_task.to_numpy(received), small_task.to_numpy(own), small_task.to_numpy(received)
    for batch in batches:
        slope, pulled = (
            numpy_network.gradients(w, *small_task.flat(batch)),
            numpy_network.gradients(v, *small_task.flat(batch)),
        )
        w = {name: w[name] - LR * slope[name] for name in w}
        v = {name: v[name] - LR * (pulled[name] + 0.7 * (v[name] - anchor[name])) for name in v}
    small_task.assert_close(state["personal"], v)
    small_task.assert_close(up["model"], w)


def test_the_defaults_do_not_switch_the_pull_off():
    task, data = small_task.task(), small_task.data([small_task.batch(0)])
    client, down = {"personal": comparisons.model(2)}, {"model": comparisons.model(1)}
    ditto_state, _ = Ditto().client_update(task, client, down, data)
    local_state, _ = Local().client_update(task, {"model": comparisons.model(2)}, {}, data)
    assert not comparisons.same(ditto_state["personal"], local_state["model"])


def test_a_round_is_scored_once_and_by_the_personal_models_alone(tmp_path):
    """Elsewhere the scores of global and personal models end in one list, of which the best is then reported."""
    task, x = small_task.task(), small_task.batch(3).x
    personal, received = comparisons.model(2), comparisons.model(1)
    scores = Ditto().predict(task, {"personal": personal}, {"model": received}, x)
    assert torch.equal(scores, task.predict(personal, x))
    assert not torch.equal(scores.argmax(1), task.predict(received, x).argmax(1))
    assert Ditto.predicts_with == ()
    quick_run.run(quick_run.settings(algorithm={"name": "ditto"}), tmp_path / "run")
    with open(tmp_path / "run" / "metrics.csv") as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["1", "2", "3"]


def test_the_personal_model_can_have_a_pass_of_its_own_length():
    task = small_task.task(epochs=3)
    assert Ditto().passes(task, 1) == {"train": Pass()}
    algorithm = Ditto(personal_epochs=2)
    assert algorithm.passes(task, 1) == {"train": Pass(), "personal": Pass(epochs=2)}
    data = comparisons.data_of(
        {"train": [small_task.batch(0)], "personal": [small_task.batch(1), small_task.batch(2)]}, LR
    )
    client, down = {"personal": comparisons.model(2)}, {"model": comparisons.model(1)}
    state, up = algorithm.client_update(task, client, down, data)
    alone, _ = Ditto().client_update(
        task, client, down, small_task.data([small_task.batch(1), small_task.batch(2)], LR)
    )
    _, sent = FedAvg().client_update(task, {}, down, small_task.data([small_task.batch(0)], LR))
    assert comparisons.same(state["personal"], alone["personal"]) and comparisons.same(up["model"], sent["model"])
    one_step = Ditto(personal_steps=1)
    assert one_step.passes(task, 1) == {"train": Pass(), "personal": Pass(steps=1)}
    with pytest.raises(ConfigError, match=r"personal_epochs = 2 and algorithm.personal_steps = 1 both say how long"):
        Ditto(personal_epochs=2, personal_steps=1).check(task, 4)


def test_only_the_global_model_travels_and_its_mean_is_plain():
    task = small_task.task()
    _, up = Ditto().client_update(
        task,
        {"personal": comparisons.model(2)},
        {"model": comparisons.model(1)},
        small_task.data([small_task.batch(0)]),
    )
    assert Ditto().uplink(task) == {"model": Mean(task.like("body", "head"), by="clients")}
    assert list(up) == ["model"] and tree.differences(up["model"], task.like("body", "head")) == []
    assert Ditto(weighting="samples").uplink(task)["model"].by == "samples"


@pytest.mark.parametrize("bn", ["average", "local"])
def test_each_model_has_batch_norm_statistics_of_its_own(bn):
    task, data = comparisons.with_batch_norm(bn=bn), small_task.data([small_task.batch(0)])
    algorithm = Ditto()
    client = algorithm.init_client(task)
    down = algorithm.publish(task, algorithm.init_server(task), np.arange(4))
    state, up = algorithm.client_update(task, client, down, data)
    assert tree.differences(state, client) == [] and ("stats" in state) == (bn == "local")
    assert ("stats" in up["model"]) == (bn == "average")
    fedavg_state, sent = FedAvg().client_update(task, FedAvg().init_client(task), down, data)
    assert comparisons.same(up["model"], sent["model"]) and all(
        comparisons.same(state[k], fedavg_state[k]) for k in fedavg_state
    )
    assert not comparisons.same(state["personal"]["stats"], client["personal"]["stats"])


def test_padding_alone_changes_neither_model():
    comparisons.check_padding(Ditto(), {"personal": comparisons.model(2)}, {"model": comparisons.model(1)}, ("train",))
