"""The samples come to a device once, whatever is computed with them."""

from pathlib import Path
from typing import Any

import pytest

import quick_run
import stub_device
import stub_run
from pflmpi.config import load as configuration
from pflmpi.experiment import build, execute, start
from pflmpi.experiment.execute import Paused, RankContext
from pflmpi.learning.task import HOST
from pflmpi.runtime.stopping import Joining
from pflmpi.transports.inprocess import InProcessTransport
from stub_device import DEVICE, StubDevice


def settings(**sections: Any) -> dict[str, Any]:
    return quick_run.settings(stub_run.settings({"algorithm": {"name": "fedavg"}}, "cnn", "loop"), **sections)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images of each copy of images to the device."""
    seen: list[int] = []
    count = StubDevice._count

    def noted(self: StubDevice, func: Any, packet: Any, args: Any, *others: Any) -> None:
        before = self.counts.uploads
        count(self, func, packet, args, *others)
        if self.counts.uploads > before and args[0].ndim == 4:
            seen.append(len(args[0]))

    monkeypatch.setattr(StubDevice, "_count", noted)
    return seen


@pytest.mark.parametrize("metric", ["train_loss", "accuracy_mean"])
def test_with_an_early_stop_the_samples_are_uploaded_once(metric: str, uploads: list[int]) -> None:
    raw, federation = settings(training={"stop": {"metric": metric, "patience": 2}}), stub_run.federation(3)
    with stub_device.stub_device():
        experiment = build.assemble(configuration.parse(raw), federation, DEVICE)
        trial = sum(uploads)
        build.setup(experiment, 1, 1)
    assert trial <= len(federation.train[0]), "the trial brings what its client has"
    assert sum(uploads) - trial == len(federation.dataset.images)


def test_all_that_computes_has_the_same_copy(uploads: list[int]) -> None:
    raw, federation = settings(evaluation={"unseen": 0.34}), stub_run.federation(3)
    with stub_device.stub_device():
        experiment = build.assemble(configuration.parse(raw), federation, DEVICE)
        first, after_a_loss = build.setup(experiment, 2, 2), build.setup(experiment, 1, 1)
        assert first.unseen is not None
        assert first.unseen.executor.pool is build.loop(experiment).pool is after_a_loss.executor.pool
    assert uploads == [len(federation.dataset.images)]


def test_a_run_that_others_join_leaves_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(*_: object) -> None:
        raise Joining

    monkeypatch.setattr(execute.rounds, "run", join)
    context = RankContext(InProcessTransport(), HOST, 1)
    with pytest.raises(Paused) as paused:
        start.start(configuration.parse(quick_run.settings()), tmp_path / "run", context, lambda _: None)
    paused.value.lock.release()
    assert "pool" not in {*vars(paused.value.experiment)}, "the ranks bring it to their devices anew"
