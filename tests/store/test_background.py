"""The process that turns records into HDF5 while a run goes on: it ends with the run, and its errors are the run's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import processes
from pflmpi.errors import RunError
from pflmpi.store import run_folder
from pflmpi.store.lock.taking import take
from pflmpi.store.records import background, segments
from pflmpi.store.records.background import Background
from project import ROOT
from store_world import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run with a recorded checkpoint; the process starts at once."""
    monkeypatch.setattr(background, "_AFTER", 0.0)
    world = World(tmp_path / "run", [0, 1, 1, 0], 0)
    world.record(0, ranks=1)
    return world


def started(world: World) -> Background:
    found = Background(world.run, take(world.run, {}, take_over=True))
    found.begin()
    processes.wait_for(lambda: run_folder.rounds(world.run) == [0], "HDF5")
    return found


def test_it_works_beside_the_run_and_the_end_waits_for_the_rest(world: World) -> None:
    process = started(world)
    process.check()
    world.train(np.array([1]))
    world.record(1, ranks=1)
    process.end()
    assert run_folder.rounds(world.run) == [0, 1] and run_folder.digest(world.run, 1) == world.digest()


def test_killed_itself_it_is_missed_and_the_end_does_its_work(world: World, caplog: pytest.LogCaptureFixture) -> None:
    process = started(world)
    assert process._process is not None
    process._process.send_signal(signal.SIGTERM)  # as a batch system sends it to all: not for this one
    process._process.kill()
    process._process.wait()
    world.record(1, ranks=1)
    process.check()
    process.check()
    assert caplog.messages == [
        "checkpoints become HDF5 at the end of the run: the process that does it was killed by signal 9"
    ]
    process.end()
    assert run_folder.rounds(world.run) == [0, 1]


def test_its_error_is_that_of_the_run(world: World) -> None:
    process = started(world)
    os.rename(world.run / "shards", world.run / "elsewhere")
    (world.run / "shards").write_text("in the way")
    world.train(np.array([1]))
    world.record(1, ranks=1)

    def failed() -> bool:
        try:
            process.check()
        except RunError as error:
            assert "while writing" in str(error) and "the last complete round is 1" in str(error), error
            return True
        return False

    processes.wait_for(failed, "its error")


def test_after_the_death_of_the_run_it_completes_what_is_recorded_and_ends(tmp_path: Path) -> None:
    program = """
import os, pathlib, sys, time
from pflmpi.store.lock.taking import take
from pflmpi.store.records import background
from store_world import World
background._AFTER = 0.0
world = World(pathlib.Path("run"), [0, 1, 1, 0], 0)
world.record(0, ranks=1)
background.Background(world.run, take(world.run, {}, False)).begin()
while not list(world.run.glob("round_*.h5")):
    time.sleep(0.01)
for round in (1, 2):
    world.record(round, ranks=1)
print(world.digest(), flush=True)
os._exit(9)
"""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        timeout=processes.PATIENCE,
    )
    assert ended.returncode == 9  # and the process has closed its output
    run = tmp_path / "run"
    processes.wait_for(lambda: run_folder.rounds(run) == [0, 1, 2], "the rest")
    with segments.exclusive(run):
        assert run_folder.digest(run, 2) == ended.stdout.strip()
