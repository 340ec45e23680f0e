"""Killed anywhere, by SIGKILL, a run continues to the bits of the run that was never stopped."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

import processes
import quick_run
from pflmpi.store import run_folder, verify

MOMENTS = int(os.environ.get("PFLMPI_KILLS", "6"))
ROUNDS = 30


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A configuration, and the digest of its undisturbed run."""
    folder = tmp_path_factory.mktemp("kill")
    raw = quick_run.settings(
        model={"name": "mlp", "hidden": 1500},  # 12 clients x 0.5 MB: writing a checkpoint takes a while
        training={"rounds": ROUNDS, "momentum": 0.5},
        partition={"clients": 30, "name": "exdir", "classes_per_client": 2, "alpha": 0.5, "min_samples": 4},
        data={"name": "digits"},
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path, quick_run.run(raw, folder / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_killed_and_continued_gives_the_same_bits(moment, reference, tmp_path):
    path, expected = reference
    draw = random.Random(moment)
    run = tmp_path / "run"
    way, ranks = [("mpi", 3), ("alone", 2), ("torchrun", 2)][moment % 3]
    start = [*processes.start_way(way, ranks), "run", str(path), "--out", str(run), "--quiet"]
    start += ["--ranks", str(ranks)] if way == "alone" else []
    process = processes.launch(start)
    processes.wait_for(
        lambda: run_folder.rounds(run)[1:] or process.poll() is not None, "the first checkpoint", every=0.0005
    )
    assert process.poll() is None, process.communicate()
    time.sleep(draw.random() * 2.0)
    if moment % 2 == 0:  # while a file is being written
        processes.wait_for(
            lambda: list(run.glob("**/*.tmp")) or process.poll() is not None, "a checkpoint write", every=0.0005
        )
    if moment % 4 < 2:
        processes.kill_all(process.pid)
        process.communicate(timeout=processes.PATIENCE)
    else:
        alive = processes.ranks_of(process.pid)
        if alive:
            os.kill(draw.choice(alive), signal.SIGKILL)
        process.communicate(timeout=processes.PATIENCE)  # which is less than they would wait for a rank
    assert not processes.descendants(process.pid)
    stopped_at = max(run_folder.rounds(run))
    if moment % 2:
        assert verify.find_newest_good(run)[0] >= stopped_at

    way, ranks = [("alone", 1), ("mpi", 2), ("alone", 3)][moment % 3]
    again = [*processes.start_way(way, ranks), "resume", str(run), "--quiet"]
    again += ["--ranks", str(ranks)] if way == "alone" else []
    done = processes.call(again)
    assert done.returncode == 0, done.stderr
    assert quick_run.digest(run) == expected, f"stopped after round {stopped_at}"
    print(f"moment {moment}: stopped after round {stopped_at} of {ROUNDS}")
    shutil.rmtree(run)
