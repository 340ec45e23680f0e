"""Sections of `hostile.py`: processes killed, stopped and asked to stop, and disks that are full.

Runs that go on by themselves after a death are in `kills.py`.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml
from trials import PATIENCE, Result, Trial, command, compare, digest, resume

import processes

ROUNDS = 24
CONFIG: dict[str, Any] = {
    "seed": 3,
    "data": {"name": "digits"},
    "partition": {"name": "exdir", "clients": 12, "classes_per_client": 2, "alpha": 0.5, "min_samples": 4},
    "model": {"name": "mlp", "hidden": 400},  # so that writing a checkpoint takes a while
    "algorithm": {"name": "fedgmh"},
    "training": {"rounds": ROUNDS, "participation": 0.4, "epochs": 4, "momentum": 0.5},
    "runtime": {"device": "cpu"},
}
RANKS = {"alone": 2, "mpi": 3, "torchrun": 2}
STARTS = 6.0  # seconds within which a kill "at the start" falls
SOON = 0.4  # seconds after a round within which one "after a round" falls
TIMEOUT = 8  # seconds that ranks wait for a stopped one


class Processes:
    """A configuration, and the digest of its undisturbed run."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(CONFIG))
        command("run", self.config, "--out", folder / "whole", "--ranks", 1, "--quiet", seconds=600)
        self.expected = digest(folder / "whole")
        self.bytes = sum(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file())

    def kill(self, draw: random.Random, folder: Path) -> Trial:
        """SIGKILL of all processes, of rank 0, or of another rank, at the start, after a round, or during a write."""
        way, moment = draw.choice(list(RANKS)), draw.choice(["start", "round", "write"])
        victim = draw.choice(["all", "rank 0", "another rank"])
        trial, run = Trial(f"{way}: {victim}, {moment}"), folder / "run"
        process = self._start(way, run)
        self._await(moment, draw, process, run)
        for pid in _chosen(process.pid, victim, draw):
            _send(pid, signal.SIGKILL)
        result = trial.saw(_end(process, trial))
        self._conclude(trial, draw, run, result)
        return trial

    def stop(self, draw: random.Random, folder: Path) -> Trial:
        """A signal that asks for a stop, or a rank that stands still for a moment or for ever."""
        way, moment = draw.choice(list(RANKS)), draw.choice(["start", "round", "write"])
        kind = draw.choice(["SIGTERM", "SIGUSR1", "SIGUSR2", "still for a moment", "still for ever"])
        trial, run = Trial(f"{way}: {kind}, {moment}"), folder / "run"
        process = self._start(way, run, "-s", f"runtime.timeout={TIMEOUT}")
        self._await(moment, draw, process, run)
        chosen = _chosen(process.pid, draw.choice(["rank 0", "another rank"]), draw)
        if kind.startswith("SIG"):
            _send(draw.choice([process.pid, *chosen]), signal.Signals[kind])
        else:
            _send(chosen[0] if chosen else 0, signal.SIGSTOP)
            if kind == "still for a moment":
                time.sleep(draw.random() * 3)
                _send(chosen[0] if chosen else 0, signal.SIGCONT)
        result = trial.saw(_end(process, trial))
        self._conclude(trial, draw, run, result)
        return trial

    def full(self, draw: random.Random, folder: Path) -> Trial:
        """A disk with room for a part of the run."""
        room = draw.randrange(1 << 16, self.bytes)
        trial, disk = Trial(f"{room >> 10} KiB"), folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "none", disk], check=True)
        try:
            result = trial.saw(command("run", self.config, "--out", disk / "run", "--ranks", 1, "--quiet"))
            if result.code not in (0, 2, 3) or (result.code and "No space left" not in result.text):
                trial.labels.add("other")
            subprocess.run(["mount", "-o", f"remount,size={8 * self.bytes}", disk], check=True)
            self._conclude(trial, draw, disk / "run", result)
        finally:
            subprocess.run(["umount", disk], check=True)
        return trial

    def _start(self, way: str, run: Path, *words: str) -> "subprocess.Popen[str]":
        start = [*processes.start_way(way, RANKS[way]), "run", str(self.config), "--out", str(run), "--quiet", *words]
        start += ["--ranks", str(RANKS[way])] if way == "alone" else []
        return processes.launch(start, stderr=subprocess.STDOUT, start_new_session=True)

    def _await(self, moment: str, draw: random.Random, process: "subprocess.Popen[str]", run: Path) -> None:
        """Wait for the moment, or the end of the run."""
        if moment == "start":
            end = time.monotonic() + draw.random() * STARTS
            while time.monotonic() < end and not (run / "round_00001.h5").exists():
                time.sleep(0.005)
            return
        first = run / f"round_{draw.randrange(1, ROUNDS // 2):05}.h5"
        end = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < end and not (run.exists() and _newest(run) >= first.name):
            time.sleep(0.002)
        if moment == "round":
            time.sleep(draw.random() * SOON)
        while moment == "write" and process.poll() is None and not list(run.glob("**/*.h5.tmp")):
            time.sleep(0.0005)

    def _conclude(self, trial: Trial, draw: random.Random, run: Path, result: Result) -> None:
        """Continue elsewhere what has not ended, and compare."""
        if result.code == 0:
            compare(trial, run, result, self.expected)
        elif result.code is not None and (draw.random() < 0.75 or not any(run.glob("round_*.h5"))):
            resume(trial, run, self.config, self.expected)
        elif result.code is not None:
            again = processes.launch([*processes.start_way("mpi", 2), "resume", str(run)], stderr=subprocess.STDOUT)
            compare(trial, run, trial.saw(_end(again, trial)), self.expected)


def _newest(run: Path) -> str:
    return max((path.name for path in run.glob("round_*.h5")), default="")


def _chosen(launcher: int, victim: str, draw: random.Random) -> list[int]:
    """The processes to hit; none where there are no ranks yet."""
    if victim == "all":
        return [launcher, *processes.descendants(launcher)]
    ranks = {_rank(pid): pid for pid in processes.ranks_of(launcher) if pid != launcher}
    chosen = [pid for rank, pid in sorted(ranks.items()) if (rank == 0) == (victim == "rank 0") and rank >= 0]
    return [draw.choice(chosen)] if chosen else []


def _rank(pid: int) -> int:
    """Rank of a process, by its environment; -1 if it is none."""
    with contextlib.suppress(OSError):
        variables = dict(each.partition(b"=")[::2] for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        return int(variables.get(b"OMPI_COMM_WORLD_RANK", variables.get(b"RANK", b"-1")))
    return -1


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)


def _end(process: "subprocess.Popen[str]", trial: Trial) -> Result:
    """The end of a command; what is left of it is killed."""
    began = time.monotonic()
    try:
        text, _ = process.communicate(timeout=PATIENCE)
        trial.seconds = trial.seconds or time.monotonic() - began
        return Result(process.returncode, text)
    except subprocess.TimeoutExpired:
        processes.kill_all(process.pid)
        text, _ = process.communicate()
        return Result(None, text)
