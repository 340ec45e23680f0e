"""Costs are those of a few real steps of each cohort."""

from unittest import mock

import numpy as np
import pytest
import torch

import quick_run
from every_algorithm import every_algorithm
from pflmpi.forecast import measuring
from pflmpi.forecast.bytes import compute_state_sizes
from pflmpi.forecast.measuring import CohortCost, Cost, Costs, measure_call, measure_cohorts, read_resident
from pflmpi.machine import own_memory
from pflmpi.runtime.executors.base import Executor
from planned_run import planned

MEGABYTE = 2**20


def test_memory_of_a_process_is_more_than_that_of_its_files():
    assert read_resident() > own_memory("RssFile") > 0


def test_the_memory_of_a_call_is_what_it_needs_besides():
    kept = np.ones(16 * MEGABYTE, np.uint8)
    call = measure_call(lambda: kept + np.ones(64 * MEGABYTE, np.uint8)[: len(kept)], torch.device("cpu"))
    assert 60 * MEGABYTE < call.memory < 120 * MEGABYTE
    assert call.seconds > 0 and call.device == 0


@pytest.mark.parametrize("training", [{"steps": 400}, {"epochs": 200}])
@pytest.mark.parametrize("name", ["fedavg", "fedamp", "fedfomo", "fedgmh-full"])
def test_a_few_steps_are_measured_however_long_a_training_is(name, training):
    run = planned(quick_run.settings(every_algorithm()[name], training=training), 1)
    steps, update = [], Executor.update

    def noted(executor, clients, *arguments):
        samples = int(executor.federation.num_train[clients[0]])
        steps.append(executor.tasks[0].training.num_steps(samples))
        return update(executor, clients, *arguments)

    def timed(call, device):
        call()
        return Cost(1.0 + 0.5 * (steps[-1] == 6), 7.0, 0.0)

    sizes = planned(quick_run.settings(every_algorithm()[name]), 1)
    with mock.patch.object(measuring, "measure_call", timed), mock.patch.object(Executor, "update", noted):
        rounds = list(run.schedule())[1:3]
        measured = measure_cohorts(run.setup, rounds, compute_state_sizes(sizes.experiment), False, 0.0)
    assert set(steps) == {2, 6} and measured.costs is not None
    (cost,) = measured.costs.cohorts.values()
    assert (cost.step, cost.train.seconds, cost.train.memory) == (0.125, 0.75, 7.0)


def test_a_group_costs_in_proportion_to_its_lanes_steps_and_tests():
    setup = planned(quick_run.settings(partition={"name": "iid", "clients": 4}), 1).setup
    costs = Costs(setup, {0: CohortCost(4, Cost(1.0, 100.0, 0.0), 0.5, Cost(8.0, 40.0, 0.0), 10)})
    two, federation = np.arange(2), setup.executor.federation
    steps = setup.task.training.num_steps(int(federation.num_train[two].max()))
    assert costs.train(two) == Cost((1.0 + 0.5 * steps) / 2, 50.0, 0.0)
    assert costs.test(two).seconds == pytest.approx(8.0 * federation.num_test[two].max() / 10 / 2)
