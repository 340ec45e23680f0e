"""A rank dies or hangs: all stop and name it, or start again from the newest checkpoint."""

import contextlib
import os
import re
import signal

import pytest
import yaml

import processes
import quick_run
from pflmpi.cli import main
from pflmpi.store import run_folder
from project import ROOT

ROUNDS = 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
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


def ranks_after_round(process, run, round):
    """Wait for a checkpoint and return the processes of the ranks in their order."""
    processes.wait_for(lambda: round in run_folder.rounds(run) or process.poll() is not None, "a checkpoint")
    assert process.poll() is None, process.communicate()
    return sorted(processes.ranks_of(process.pid))


RESTARTING = {
    "alone": [*processes.PFLMPI, "run", "--ranks", "2", "--restarts", "1"],
    "mpirun": [str(ROOT / "launch" / "mpirun"), "--restarts", "1", "-n", "2", *processes.PFLMPI, "run"],
    "torchrun": [str(ROOT / "launch" / "torchrun"), "--restarts", "1", "--nproc-per-node=2", "-m", "pflmpi", "run"],
}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("way", RESTARTING)
def test_all_ranks_start_again_after_one_was_killed_and_reach_the_same_bits(way, victim, whole, tmp_path):
    config, expected = whole
    process = processes.launch([*RESTARTING[way], str(config), "--out", str(tmp_path / "run")], cwd=tmp_path)
    os.kill(ranks_after_round(process, tmp_path / "run", 2)[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == 0, err
    assert quick_run.digest(tmp_path / "run") == expected
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == ROUNDS + 1
    assert way == "torchrun" or "all start again from the newest checkpoint (1 of 1)" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("way", RESTARTING)
def test_a_rank_that_fails_by_itself_is_not_started_again(way, tmp_path):
    (tmp_path / "own.py").write_text(FAILS)
    raw = quick_run.settings(algorithm={"name": f"{tmp_path}/own.py:Fails"})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
    done = processes.call(
        [*RESTARTING[way], str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run")], cwd=tmp_path
    )
    assert done.returncode == 3 and "client 0 is ill" in done.stderr, done.stderr
    assert "all start again" not in done.stderr and done.stderr.count("client 0 is ill") == 1


FAILS = """
from dataclasses import dataclass
from pflmpi.algorithms.fedavg import FedAvg

@dataclass(frozen=True, kw_only=True)
class Fails(FedAvg):
    def client_update(self, task, client, down, data):
        raise ValueError("client 0 is ill")
"""


@pytest.mark.parametrize(
    ("environment", "words", "expected"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            ["--restarts", "1"],
            "launch/mpirun, launch/torchrun or launch/srun --restarts 1",
        ),
        ({"TORCHELASTIC_MAX_RESTARTS": "1"}, ["--ranks", "1"], "a launcher with restarts without --out"),
    ],
)
def test_restarts_that_cannot_be_are_refused_with_what_to_use(
    environment, words, expected, tmp_path, monkeypatch, capfd
):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", str(tmp_path / "config.yaml"), *words]) == 2
    assert expected in " ".join(capfd.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mpi", "torchrun"])
def test_a_rank_that_hangs_is_named(way, whole, tmp_path):
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
def test_a_rank_that_hangs_before_mpi_has_started_ends_the_run(whole, tmp_path):
    one_sleeps = '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || exec sleep 1000; exec "$@"'
    launcher, *options = processes.start_way("mpi", 2)
    command = [launcher, *options[:2], "sh", "-c", one_sleeps, "sh", *options[2:]]
    done = processes.call([*command, "run", str(whole[0]), "--out", str(tmp_path / "run"), "-s", "runtime.timeout=5"])
    assert done.returncode == 3
    assert "pflmpi: the start of MPI did not end within 30.0 s: a rank hangs" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mpi", "torchrun", "alone"])
def test_by_default_all_stop_and_the_dead_rank_is_named(way, whole, tmp_path):
    start = [*processes.start_way(way, 3), "run", str(whole[0]), "--out", str(tmp_path / "run")]
    process = processes.launch([*start, *(["--ranks", "3"] if way == "alone" else [])])
    ranks = ranks_after_round(process, tmp_path / "run", 1)
    os.kill(ranks[1], signal.SIGKILL)
    out, err = process.communicate(timeout=processes.PATIENCE)  # which is less than they would wait for a rank
    assert process.returncode not in (0, 2, 75)
    patterns = {"mpi": r"rank 1 with PID \d+ on node", "torchrun": r"local_rank: 1 \(pid", "alone": "rank 1 was killed"}
    assert re.search(patterns[way], out + err), out + err
