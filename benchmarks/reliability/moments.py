"""Runs on several ranks, the moment of a blow, and whom it hits."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import processes
from reliability.trials import PATIENCE, Result, Trial

ROUNDS = 24
CONFIG = {
    "seed": 3,
    "data": {"name": "digits"},
    "partition": {"name": "exdir", "clients": 12, "classes_per_client": 2, "alpha": 0.5, "min_samples": 4},
    "model": {"name": "mlp", "hidden": 400},  # so that writing a checkpoint takes a while
    "algorithm": {"name": "fedgmh"},
    "training": {"rounds": ROUNDS, "participation": 0.4, "epochs": 4, "momentum": 0.5},
    "runtime": {"device": "cpu"},
}
RANKS = {"alone": 2, "mpi": 3, "torchrun": 2}
MOMENTS = ("start", "round", "write")
VICTIMS = ("all", "rank 0", "another rank")
STARTS = 6.0  # seconds within which a blow "at the start" falls
SOON = 0.4  # seconds after a round within which one "after a round" falls

Process = subprocess.Popen[str]


def start(way: str, config: Path, run: Path, *words: str) -> Process:
    """Start a run in one of the ways of `RANKS`."""
    command = [*processes.start_way(way, RANKS[way]), "run", str(config), "--out", str(run), "--quiet", *words]
    command += ["--ranks", str(RANKS[way])] if way == "alone" else []
    return processes.launch(command, stderr=subprocess.STDOUT, start_new_session=True)


def await_moment(moment: str, draw: random.Random, process: Process, run: Path) -> None:
    """Wait for a random moment of that kind, or the end of the run."""
    if moment == "start":
        end = time.monotonic() + draw.random() * STARTS
        while time.monotonic() < end and process.poll() is None and not (run / "round_00001.h5").exists():
            time.sleep(0.02)
        return
    first = f"round_{draw.randrange(1, ROUNDS // 2):05}.h5"
    end = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < end and not (run.exists() and _newest(run) >= first):
        time.sleep(0.02)
    if moment == "round":
        time.sleep(draw.random() * SOON)
    while moment == "write" and process.poll() is None and not list(run.glob("**/*.h5.tmp")):
        time.sleep(0.002)


def victims(launcher: int, victim: str, draw: random.Random) -> list[int]:
    """The processes to hit; none where there are no such ranks yet."""
    if victim == "all":
        return [launcher, *processes.descendants(launcher)]
    pids = sorted(pid for pid in processes.ranks_of(launcher) if pid != launcher)
    ranks = {rank_of(pid): pid for pid in pids}
    if list(ranks) == [-1]:  # forks, which have the environment of the process that they come from
        ranks = dict(enumerate(pids))
    chosen = [pid for rank, pid in sorted(ranks.items()) if (rank == 0) == (victim == "rank 0") and rank >= 0]
    return [draw.choice(chosen)] if chosen else []


def rank_of(pid: int) -> int:
    """Rank of a process, by its environment; -1 if it is none."""
    with contextlib.suppress(OSError):
        variables = dict(each.partition(b"=")[::2] for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        return int(variables.get(b"OMPI_COMM_WORLD_RANK", variables.get(b"RANK", b"-1")))
    return -1


def hit(pids: Sequence[int], number: signal.Signals) -> bool:
    """Send a signal; whether any of the processes was still there."""
    sent = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            sent.append(pid)
    return bool(sent)


def end_of(process: Process, trial: Trial) -> Result:
    """The end of a command; what hangs is killed."""
    began = time.monotonic()
    try:
        text, _ = process.communicate(timeout=PATIENCE)
        trial.seconds = trial.seconds or time.monotonic() - began
        return Result(process.returncode, text)
    except subprocess.TimeoutExpired:
        processes.kill_all(process.pid)
        text, _ = process.communicate()
        return Result(None, text)


def _newest(run: Path) -> str:
    return max((path.name for path in run.glob("round_*.h5")), default="")
