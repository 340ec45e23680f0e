"""A rank dies or hangs: the others go on (ULFM), are started again (torchrun), or stop and name it."""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

import processes
import quick_run
from checkpoints import complete
from pflmpi.config import load as configuration
from pflmpi.errors import ConfigError
from pflmpi.transports import open_transport
from pflmpi.transports.detect import ALONE, Launch

ROUNDS = 20
KILLS = int(os.environ.get("PFLMPI_KILLS", "2"))


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


def survivors(config: Path, run: Path, ranks: int, *more: str) -> "subprocess.Popen[str]":
    start = [str(processes.BIN / "mpirun"), *processes.SURVIVE, "-n", str(ranks), *processes.PFLMPI]
    start += ["run", str(config), "--out", str(run), "-s", "runtime.faults=continue", *more]
    return processes.launch(start, env={**processes.ENVIRONMENT, "PFLMPI_EXIT_FILE": f"{run}.exit"})


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(KILLS))
def test_the_others_take_over_the_clients_of_a_rank_that_dies(
    moment: int, whole: tuple[Path, str], tmp_path: Path
) -> None:
    config, expected = whole
    draw = random.Random(moment)
    every = [1, 3][moment % 2]  # rounds since the last checkpoint are repeated
    process = survivors(config, tmp_path / "run", 4, "-s", f"checkpoint.every={every}")
    ranks = ranks_after_round(process, tmp_path / "run", every)
    time.sleep(draw.random())
    victim = draw.choice([0, 1, 2, 3]) if moment else 0
    os.kill(ranks[victim], signal.SIGKILL)
    out, err = process.communicate(timeout=processes.PATIENCE)
    assert (tmp_path / "run.exit").read_text() == "0\n", err
    assert quick_run.digest(tmp_path / "run") == expected
    assert f"pflmpi: rank {victim} (host " in err and ") died; 3 ranks go on\n" in err, err
    assert re.search(r"pflmpi: the run goes on from round \d", err)
    assert f"round {ROUNDS}/{ROUNDS}" in err and "last accuracy" in out, "whoever is rank 0 shows the rounds"
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == ROUNDS + 1


@pytest.mark.slow
def test_one_rank_is_left_in_the_end(whole: tuple[Path, str], tmp_path: Path) -> None:
    config, expected = whole
    process = survivors(config, tmp_path / "run", 3)
    ranks = ranks_after_round(process, tmp_path / "run", 1)
    for rank in ranks[:2]:  # rank 0, and the rank that has taken the server over
        os.kill(rank, signal.SIGKILL)
        time.sleep(0.3)
    _, err = process.communicate(timeout=processes.PATIENCE)
    assert (tmp_path / "run.exit").read_text() == "0\n", err
    assert quick_run.digest(tmp_path / "run") == expected
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == ROUNDS + 1


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


@pytest.mark.parametrize("launch", [ALONE, Launch("torchrun", 0, 2), Launch("slurm", 0, 2), Launch("mpi", 0, 2)])
def test_going_on_is_refused_where_it_cannot_be(launch: Launch) -> None:
    with pytest.raises(ConfigError, match=r"start with launch/mpirun --ft"):
        open_transport("auto", launch, 1.0, fault_tolerant=True)


def test_going_on_is_refused_before_ranks_are_started(whole: tuple[Path, str]) -> None:
    assert configuration.load(whole[0], ["runtime.faults=continue"]).runtime.faults == "continue"
    done = processes.call([*processes.PFLMPI, "run", str(whole[0]), "--ranks", "2", "-s", "runtime.faults=continue"])
    assert done.returncode == 2
    assert "nothing has started this" in done.stderr
