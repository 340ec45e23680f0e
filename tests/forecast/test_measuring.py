"""Costs are measured on real calls; what was measured is found again for the same work on the same machine."""

from pathlib import Path

import numpy as np
import pytest
import torch

import quick_run
from pflmpi.forecast import calibration
from pflmpi.forecast.cache import Cache
from pflmpi.forecast.communication import Link
from pflmpi.forecast.costs import CallCost
from pflmpi.forecast.process import Cost, measure, resident, resident_files
from pflmpi.runtime.schedule import schedule
from planned_run import planned

LINK, WORK = Link(1e-4, 1e9), {"lanes": [1, 4]}
LOGIN, NODE = {"cpu": "a", "device": "cpu"}, {"cpu": "b", "device": "NVIDIA H100"}
MEGABYTE = 2**20


def test_memory_of_a_process_is_more_than_that_of_its_files() -> None:
    assert resident() > resident_files() > 0


def test_the_memory_of_a_call_is_what_it_needs_besides() -> None:
    kept = np.ones(16 * MEGABYTE, np.uint8)
    found = measure(lambda: kept + np.ones(64 * MEGABYTE, np.uint8)[: len(kept)], torch.device("cpu"))
    assert 60 * MEGABYTE < found.memory < 120 * MEGABYTE
    assert found.seconds > 0 and found.device == 0


def test_a_measurement_is_found_on_its_machine_alone(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "folder")
    assert not cache.keep(LINK, WORK, LOGIN)
    assert cache.find(Link, WORK, LOGIN) == LINK
    assert cache.find(Link, WORK, NODE) is None
    assert cache.find(Link, {"lanes": [2]}, LOGIN) is None
    assert Cache(cache.folder, renew=True).find(Link, WORK, LOGIN) is None


def test_what_a_gpu_has_measured_is_found_on_a_machine_without_one(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.keep(LINK, WORK, LOGIN)
    assert cache.find_on_gpu(Link, WORK) is None
    cache.keep(Link(2e-4, 1e9), WORK, NODE)
    assert cache.find_on_gpu(Link, WORK) == (Link(2e-4, 1e9), NODE)
    assert cache.find_on_gpu(Link, {"lanes": [2]}) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"machine": {}, "numbers": {"delay": "fast", "rate": 1}}'])
def test_a_damaged_measurement_is_no_measurement(damage: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.keep(LINK, WORK, LOGIN)
    (path,) = tmp_path.iterdir()
    path.write_text(damage)
    assert cache.find(Link, WORK, LOGIN) is None
    assert cache.find_on_gpu(Link, WORK) is None


@pytest.mark.parametrize(("training", "most"), [({"steps": 40}, 40), ({"epochs": 2}, 2 * 8)])
def test_as_many_steps_are_measured_as_a_round_has(
    training: dict[str, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = planned(quick_run.settings(training=training, partition={"name": "iid", "clients": 4}), 1).setup
    steps = []

    def trial(*arguments: object) -> calibration._Trial:
        steps.append((made := make(*arguments)).steps)  # type: ignore[arg-type]
        return made

    make = calibration._trial
    monkeypatch.setattr(calibration, "_trial", trial)
    monkeypatch.setattr(calibration, "measure", lambda call, device: Cost(1e-3, 0.0, 0.0))
    _, first = list(schedule(ready, None))[:2]
    calibration.calibrate(ready, first, [np.arange(2)], 0)
    assert max(steps) == most


def test_a_call_with_one_number_of_lanes_costs_what_was_measured() -> None:
    cost = CallCost.through([(4, 1, Cost(1.0, 100.0, 0.0)), (4, 11, Cost(3.0, 50.0, 0.0))])
    assert cost.of(4, 6).seconds == pytest.approx(2.0)
    assert cost.of(4, 11).memory == pytest.approx(50.0)
    assert cost.of(4, 31).memory == 0.0, "no less than nothing"
