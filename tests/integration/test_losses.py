"""A rank dies or hangs: all stop and name it, or start again from the newest checkpoint."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

import processes
import quick_run
from checkpoints import complete

ROUNDS = 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A configuration, and the digest of its undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    raw = quick_run.settings(
        training={"rounds": ROUNDS, "epochs": 5, "momentum": 0.5},
        partition={"clients": 12, "name": "exdir", "classes_per_client": 2, "alpha": 0.5, "min_samples": 4},
        data={"name": "digits"},
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path, quick_run.run(raw, folder / "run")


def ranks_after_round(process: "subprocess.Popen[str]", run: Path, round: int) -> list[int]:
    """Wait for a checkpoint and return the processes of the ranks in their order."""
    processes.wait_for(lambda: round in complete(run) or process.poll() is not None, "a checkpoint")
    assert process.poll() is None, process.communicate()
    return sorted(processes.ranks_of(process.pid))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_starts_the_ranks_again_and_they_continue(
    victim: int, whole: tuple[Path, str], tmp_path: Path
) -> None:
    config, expected = whole
    start = [str(processes.BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "--max-restarts=2", "-m", "pflmpi"]
    process = processes.launch([*start, "run", str(config), "--out", str(tmp_path / "run")])
    os.kill(ranks_after_round(process, tmp_path / "run", 2)[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == 0, err
    assert quick_run.digest(tmp_path / "run") == expected


def test_a_run_that_may_be_started_again_needs_a_folder(whole: tuple[Path, str]) -> None:
    environment = {**processes.ENVIRONMENT, "TORCHELASTIC_MAX_RESTARTS": "1"}
    done = processes.call([*processes.PFLMPI, "run", str(whole[0]), "--ranks", "1"], env=environment)
    assert done.returncode == 2
    assert "torchrun --max-restarts without --out" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mpi", "torchrun"])
def test_a_rank_that_hangs_is_named(way: str, whole: tuple[Path, str], tmp_path: Path) -> None:
    start = [*processes.start_way(way, 3), "run", str(whole[0]), "--out", str(tmp_path / "run")]
    process = processes.launch([*start, "-s", "runtime.timeout=12"])
    ranks = ranks_after_round(process, tmp_path / "run", 1)
    os.kill(ranks[2], signal.SIGSTOP)
    try:
        err = processes.errors_until(process, "did not come to it")
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[2], signal.SIGCONT)  # torchrun waits 30 s before it kills a rank that does not end
        err += processes.errors_until(process)
    finally:
        processes.kill_all(process.pid)
        process.communicate()
    assert process.returncode == (3 if way == "mpi" else 1)
    assert re.search(r"did not end within \d+\.\d s: rank 2 \(host \S+, process \d+\) did not come to it", err), err


@pytest.mark.slow
def test_a_rank_that_hangs_before_mpi_has_started_ends_the_run(whole: tuple[Path, str], tmp_path: Path) -> None:
    one_sleeps = '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || exec sleep 1000; exec "$@"'
    launcher, *options = processes.start_way("mpi", 2)
    command = [launcher, *options[:2], "sh", "-c", one_sleeps, "sh", *options[2:]]
    done = processes.call([*command, "run", str(whole[0]), "--out", str(tmp_path / "run"), "-s", "runtime.timeout=5"])
    assert done.returncode == 3
    assert "pflmpi: the start of MPI did not end within 30.0 s: a rank hangs" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mpi", "torchrun", "alone"])
def test_by_default_all_stop_and_the_dead_rank_is_named(way: str, whole: tuple[Path, str], tmp_path: Path) -> None:
    start = [*processes.start_way(way, 3), "run", str(whole[0]), "--out", str(tmp_path / "run")]
    process = processes.launch([*start, *(["--ranks", "3"] if way == "alone" else [])])
    ranks = ranks_after_round(process, tmp_path / "run", 1)
    os.kill(ranks[1], signal.SIGKILL)
    out, err = process.communicate(timeout=processes.PATIENCE)  # which is less than they would wait for a rank
    assert process.returncode not in (0, 2, 75)
    said = {"mpi": r"rank 1 with PID \d+ on node", "torchrun": r"local_rank: 1 \(pid", "alone": "rank 1 was killed"}
    assert re.search(said[way], out + err), out + err
