"""The samples come to a device once, whatever is computed with them, and to a rank only those of its own clients."""

import numpy as np
import pytest

import quick_run
import stub_device
import stub_run
from every_algorithm import every_algorithm
from pflmpi.config import load as configuration
from pflmpi.experiment import build
from pflmpi.experiment.build import prepare
from pflmpi.learning.task import HOST
from pflmpi.runtime.executors import batches
from pflmpi.runtime.executors.base import Loop
from pflmpi.runtime.executors.batches import Pool
from pflmpi.store import metrics_file
from stub_device import DEVICE, StubDevice


def settings(**sections):
    return quick_run.settings(stub_run.settings({"algorithm": {"name": "fedavg"}}, "cnn", "loop"), **sections)


@pytest.fixture
def uploads(monkeypatch):
    """The number of images of each copy of images to the device."""
    seen: list[int] = []
    count = StubDevice._count

    def noted(self, func, packet, args, *rest):
        before = self.counts.uploads
        count(self, func, packet, args, *rest)
        if self.counts.uploads > before and args[0].ndim == 4:
            seen.append(len(args[0]))

    monkeypatch.setattr(StubDevice, "_count", noted)
    return seen


@pytest.mark.parametrize("metric", ["train_loss", "accuracy_mean"])
def test_with_an_early_stop_the_samples_are_uploaded_once(metric, uploads):
    raw, federation = settings(training={"stop": {"metric": metric, "patience": 2}}), stub_run.federation(3)
    with stub_device.stub_device():
        experiment = build.prepare(configuration.parse(raw), DEVICE, federation=federation)
        trial = sum(uploads)
        build.setup(experiment, 1, 1)
    assert trial <= len(federation.train[0]), "the trial brings what its client has"
    assert sum(uploads) - trial == len(federation.dataset.images)


def test_all_that_computes_has_the_same_copy(uploads):
    raw, federation = settings(evaluation={"unseen": 0.34}), stub_run.federation(3)
    with stub_device.stub_device():
        experiment = build.prepare(configuration.parse(raw), DEVICE, federation=federation)
        first, after_a_loss = build.setup(experiment, 2, 2), build.setup(experiment, 1, 1)
        assert first.unseen.executor.pool is build.executor_of(experiment, Loop).pool is after_a_loss.executor.pool
    assert uploads == [len(federation.dataset.images)]


SPREAD = {"partition": {"clients": 9}, "evaluation": {"unseen": 0.2}}
CASES = every_algorithm()


def samples_of(setup, clients):
    everyone = setup.unseen.executor.federation
    return {int(sample) for client in clients for part in (everyone.train, everyone.test) for sample in part[client]}


def test_a_rank_has_the_samples_of_the_clients_that_live_there():
    setup = build.setup(prepare(configuration.parse(quick_run.settings(CASES["ditto"], **SPREAD)), HOST), 3, 3)
    hosted = []
    for rank, unseen in enumerate(setup.unseen.groups):
        samples = setup.samples(rank)
        clients = [*setup.placement.hosted(rank), *np.concatenate([[], *unseen]).astype(int)]
        assert samples.tolist() == sorted({0} | samples_of(setup, clients)), (
            "its clients', and the one that fills lanes"
        )
        hosted += samples.tolist()[1:]
    assert len(hosted) == len(set(hosted)), "together they have one copy"
    assert {0, *hosted} == {0} | samples_of(setup, [*range(9)])


def test_clients_that_keep_nothing_may_come_from_anywhere():
    raw = quick_run.settings(CASES["fedavg"], runtime={"server": "dedicated"}, **SPREAD)
    setup = build.setup(prepare(configuration.parse(raw), HOST), 3, 3)
    assert [setup.samples(rank) for rank in (1, 2)] == [None, None]
    assert setup.samples(0) == [0], "a rank that only serves computes none"


@pytest.mark.parametrize(
    "case, executor",
    [("ditto", "loop"), ("ditto", "lanes"), ("fedamp", "loop"), ("fedper", "lanes"), ("fedproto", "loop")],
)
def test_a_rank_computes_the_same_bits_with_the_samples_of_its_clients(case, executor, tmp_path, monkeypatch):
    raw = quick_run.settings(CASES[case], **SPREAD, runtime={"executor": executor, "lanes": 3})
    expected = quick_run.run(raw, tmp_path / "all", 3)
    made, sizes = build.setup, []

    def on_gpus(experiment, ranks, slots, rank):
        ready = made(experiment, ranks, slots, rank)
        assert ready.executor.pool is experiment.pool, "on the host nothing is copied"
        samples = ready.samples(rank)
        sizes.append(len(samples))
        return ready.with_pool(Pool.of_some(experiment.federation.dataset, HOST, samples))

    monkeypatch.setattr(build, "setup", on_gpus)
    assert quick_run.run(raw, tmp_path / "some", 3) == expected
    assert sum(sizes) == 400 + 2 and max(sizes) < 300, "one copy, and the first sample on each rank"
    accuracies = ["accuracy_mean", "unseen_accuracy_mean", "train_loss"]
    kept, alone = (
        [[row[name] for name in accuracies] for row in metrics_file.read(tmp_path / name)] for name in ("all", "some")
    )
    assert kept == alone


def test_samples_of_others_are_not_there():
    setup = build.setup(prepare(configuration.parse(quick_run.settings(CASES["ditto"])), HOST), 2, 2)
    samples, other_clients = setup.samples(0), setup.placement.hosted(1)
    rank_setup = setup.with_pool(Pool.of_some(setup.executor.federation.dataset, HOST, samples))
    with pytest.raises(AssertionError, match="own clients"):
        rank_setup.executor.pool.places(rank_setup.executor.federation.test[other_clients[0]])


def test_only_its_samples_go_up_to_the_device_of_a_rank(uploads, monkeypatch):
    federation = stub_run.federation(3)
    monkeypatch.setattr(batches, "_MAX_COPIED", 10 * federation.dataset.images[0].nbytes)
    with stub_device.stub_device():
        raw = quick_run.settings(stub_run.settings({"algorithm": {"name": "ditto"}}, "cnn", "loop"))
        setup = build.setup(build.prepare(configuration.parse(raw), DEVICE, federation=federation), 2, 2, rank=1)
        samples, pool = setup.samples(1), setup.executor.pool
        np.testing.assert_array_equal(pool.images.to(HOST).numpy(), federation.dataset.images[samples])
        np.testing.assert_array_equal(pool.labels.to(HOST).numpy(), federation.dataset.labels[samples])
    assert pool.images.device == DEVICE and sum(uploads) == len(samples) < len(federation.dataset.labels)
    assert max(uploads) == 10, "the host copies few at a time"
