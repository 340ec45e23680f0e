"""`data.resident`: samples that stay on the host of a device give the bits of samples that are on it."""

from unittest import mock

import numpy as np
import pytest
import torch

import quick_run
import stub_device
import stub_run
from every_algorithm import every_algorithm
from pflmpi.config import load as configuration
from pflmpi.experiment import build
from pflmpi.experiment.stored_config import stored_config
from pflmpi.forecast.bytes import compute_state_sizes, pool_bytes
from pflmpi.forecast.measuring import ProcessMemory
from pflmpi.forecast.memory import forecast_memory
from pflmpi.forecast.ranks import lay_out
from pflmpi.learning.task import HOST
from planned_run import planned
from stub_device import DEVICE

CASES = every_algorithm()


def settings(case, executor, resident):
    raw = stub_run.settings(CASES[case], "mlp", executor)
    return {**raw, "data": {**raw["data"], "resident": resident}}


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("case", ["fedavg", "ditto", "fedproto", "perfedavg"])  # the last adapts before a test
def test_bits_are_the_same_wherever_samples_are(case, executor):
    expected = stub_run.run(settings(case, executor, "auto"), False).values
    for resident in ("device", "host"):
        actual = stub_run.run(settings(case, executor, resident), True).values
        assert actual.keys() == expected.keys()
        for path, leaf in expected.items():
            assert torch.equal(actual[path], leaf), (resident, path)


def of(resident, **sections):
    raw = quick_run.settings(CASES["ditto"], runtime={"executor": "loop"}, **sections)
    return configuration.parse({**raw, "data": {**raw["data"], "resident": resident}})


def test_a_device_gets_the_samples_of_the_clients_that_are_computed():
    federation = stub_run.federation(1)
    with stub_device.stub_device() as stub:
        experiment = build.prepare(of("host"), DEVICE, federation=federation)
        setup = build.setup(experiment, 1, 1)
        assert setup.executor.device == DEVICE and setup.executor.pool.images.device == HOST
        assert setup.executor.pool.images.data_ptr() == federation.dataset.images.ctypes.data, "no copy on the host"
        before = stub.bytes_moved
        pool = setup.executor.pool.on_device([federation.train[1]])
        samples = np.union1d([0], federation.train[1])  # the first sample fills the batches of lanes
        assert pool.held.tolist() == samples.tolist() and pool.device == DEVICE
        assert np.array_equal(pool.images.cpu().numpy(), federation.dataset.images[samples])
        assert np.array_equal(pool.labels.cpu().numpy(), federation.dataset.labels[samples])
        assert stub.bytes_moved - before < 3 * len(samples) * (64 + 8), "up once, and down for this test"


@pytest.mark.parametrize("memory, on_host", [(2.1, False), (1.9, True)])
def test_auto_keeps_samples_on_the_host_that_take_more_than_half_of_a_gpu(memory, on_host, monkeypatch):
    federation = stub_run.federation(1)
    monkeypatch.setattr(build, "device_memory", lambda device: memory * federation.dataset.images.nbytes)
    with stub_device.stub_device():
        for resident, expected in (("auto", on_host), ("device", False), ("host", True)):
            experiment = build.prepare(of(resident), DEVICE, federation=federation)
            assert (build.setup(experiment, 1, 1).executor.pool.goes_to == DEVICE) == expected
            if resident == "auto":  # each rank has a part, which fits
                assert build.setup(experiment, 3, 3, 1).executor.pool.goes_to is None
    experiment = build.prepare(of("host"), HOST, federation=federation)
    assert build.setup(experiment, 1, 1, 0).executor.pool.goes_to is None, "there is one memory"


def test_a_plan_counts_the_samples_on_their_way():
    raw = quick_run.settings(CASES["ditto"], runtime={"executor": "loop", "device": "auto"})
    world = planned(raw, 1)
    laid_out, (_, *rounds) = lay_out(world.experiment.config.runtime, 1, 1, 1, 2), world.schedule()
    args = world.setup, laid_out, rounds, compute_state_sizes(world.experiment), None, ProcessMemory(0, 0, 0, 0), False
    (resident,), (on_host,) = forecast_memory(*args), forecast_memory(*args, most_resident=0.0)
    federation, groups = world.setup.executor.federation, [group for plan in rounds for group in plan.training[0]]
    sent = 2 * max(federation.num_train[group].sum() for group in groups) * federation.dataset.images[:1].nbytes
    assert resident.device - on_host.device == pool_bytes(world.setup, 0) - sent
    assert on_host.work - resident.work == sent, "in pinned memory of the host"


def test_a_run_continues_with_samples_elsewhere(tmp_path):
    raw = quick_run.settings(CASES["fedavg"])
    quick_run.run(raw, tmp_path / "run")
    assert stored_config(tmp_path / "run", ["data.resident=host"]).data.resident == "host"
    with mock.patch.dict(raw["data"], resident="nowhere"), pytest.raises(Exception, match="'auto', 'device' or 'host'"):
        configuration.parse(raw)
