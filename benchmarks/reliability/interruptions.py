"""Processes of a run killed, stopped, and asked to stop; the run is then resumed elsewhere."""

import itertools
import random
import signal
import subprocess
import time
from pathlib import Path

import yaml

import processes
from reliability.moments import CONFIG, MOMENTS, RANKS, VICTIMS, await_moment, end_of, hit, start, victims
from reliability.trials import Result, Trial, command, compare, digest, resume

TIMEOUT = 8  # seconds that ranks wait for a stopped one
_PAUSES = ("still for a moment", "still for ever")


class Interruptions:
    """A configuration, and the digest of its undisturbed run."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(CONFIG))
        command("run", self.config, "--out", folder / "whole", "--ranks", 1, "--quiet")
        self.expected = digest(folder / "whole")

    def kill(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """SIGKILL of all processes, of rank 0, or of another rank, at the start, after a round, or during a write."""
        for again in itertools.count():
            way, moment, victim = draw.choice(list(RANKS)), draw.choice(MOMENTS), draw.choice(VICTIMS)
            trial, run = Trial(f"{way} {victim}, {moment}"), folder / f"run{again}"
            process = start(way, self.config, run)
            await_moment(moment, draw, process, run)
            killed = process.poll() is None and hit(victims(process.pid, victim, draw) or [process.pid], signal.SIGKILL)
            result = end_of(process, trial)
            if killed:  # and not too late
                trial.saw(result)
                self._conclude(trial, draw, run, result)
                return trial
        raise AssertionError

    def stop(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """A signal that asks for a stop, or a rank that stands still for a moment or for ever."""
        for again in itertools.count():
            way, moment = draw.choice(list(RANKS)), draw.choice(MOMENTS)
            kind = draw.choice(["SIGTERM", "SIGUSR1", "SIGUSR2", *_PAUSES])
            trial, run = Trial(f"{way} {kind}, {moment}"), folder / f"run{again}"
            process = start(way, self.config, run, "-s", f"runtime.timeout={TIMEOUT}")
            await_moment(moment, draw, process, run)
            chosen = victims(process.pid, draw.choice(VICTIMS[1:]), draw)
            if kind not in _PAUSES:
                chosen = [draw.choice([process.pid, *chosen])]
            begun = process.poll() is None and hit(chosen, signal.SIGSTOP if kind in _PAUSES else signal.Signals[kind])
            if kind == _PAUSES[0]:
                time.sleep(draw.random() * 3)
                hit(chosen, signal.SIGCONT)
            result = end_of(process, trial)
            if begun:
                trial.saw(result)
                self._conclude(trial, draw, run, result)
                return trial
        raise AssertionError

    def _conclude(self, trial: Trial, draw: random.Random, run: Path, result: Result) -> None:
        """Continue elsewhere what has not ended, and compare."""
        if result.code is None or result.code == 0:
            compare(trial, run, result, self.expected)
            return
        if draw.random() < 0.5 and run.exists():
            run = run.rename(run.with_name("moved"))
        if draw.random() < 0.75 or not any(run.glob("round_*.h5")):
            resume(trial, run, self.config, self.expected)
        else:
            again = [*processes.start_way(draw.choice(["mpi", "torchrun"]), 2), "resume", str(run), "--quiet"]
            process = processes.launch(again, stderr=subprocess.STDOUT, start_new_session=True)
            compare(trial, run, trial.saw(end_of(process, trial)), self.expected)
