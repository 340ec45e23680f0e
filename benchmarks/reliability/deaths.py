"""Ranks that are killed where the launcher starts all again."""

import itertools
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import yaml

import processes
from project import ROOT
from reliability.moments import CONFIG, hit, rank_of
from reliability.trials import PATIENCE, Result, Trial, command, compare, digest

ROUNDS = 16
SOON = 0.2  # seconds after a round within which a kill falls; some rounds long


_STARTS = {
    "alone": [*processes.PFLMPI, "run", "--ranks", "3", "--restarts", "2"],
    "mpirun": [str(ROOT / "launch" / "mpirun"), "--restarts", "2", "-n", "3", *processes.PFLMPI, "run"],
    "torchrun": [str(ROOT / "launch" / "torchrun"), "--restarts", "2", "--nproc-per-node=3", "-m", "pflmpi", "run"],
}


class Deaths:
    """A configuration, and the digest of its undisturbed run."""

    def __init__(self, folder: Path) -> None:
        self._config = folder / "config.yaml"
        training = CONFIG["training"] | {"rounds": ROUNDS, "epochs": 6}
        self._config.write_text(yaml.safe_dump(CONFIG | {"model": {"name": "mlp", "hidden": 32}, "training": training}))
        command("run", self._config, "--out", folder / "whole", "--ranks", 1, "--quiet")
        self._expected = digest(folder / "whole")

    def restarted(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """Rank 0 or another one of 3 is killed between the making of the folder and the last round."""
        way, victim = draw.choice(sorted(_STARTS)), draw.choice(["rank 0", "another rank"])
        for again in itertools.count():
            run, moment = folder / f"run{again}", draw.randrange(-1, ROUNDS)
            process = _start(way, self._config, run)
            shown = _Output(process)
            killed = _kill_one(process, run, moment, victim, draw)
            result = shown.end()
            if killed is not None:  # and not too late
                trial = Trial(f"{way}, {victim} after round {moment}")
                trial.seconds = shown.first_after(killed, r"^round ")
                self._judge(trial, run, result)
                return trial
        raise AssertionError

    def _judge(self, trial: Trial, run: Path, result: Result) -> None:
        """Note what came of it: right are the exit code, the digest, and a line of metrics for each round."""
        trial.saw(result)
        compare(trial, run, Result(result.code, ""), self._expected)
        lines = (run / "metrics.csv").read_text().splitlines()
        trial.labels |= {"wrong bits"} if result.code == 0 and len(lines) != ROUNDS + 1 else set()


class _Output:
    """The lines of a process with the times at which they came."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process, self._lines = process, list[tuple[float, str]]()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def end(self) -> Result:
        """Wait for the end of the process, which is killed if it hangs."""
        code: int | None
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            processes.kill_all(self._process.pid)
            code = None
        self._reader.join()
        self._process.wait()
        return Result(code, "".join(line for _, line in self._lines))

    def first_after(self, moment: float, pattern: str) -> float | None:
        """Seconds from a moment to the next line that has a pattern."""
        found = (then - moment for then, line in self._lines if then > moment and re.search(pattern, line))
        return next(found, None)

    def _read(self) -> None:
        self._lines += ((time.monotonic(), line) for line in self._process.stdout or ())


def _start(way: str, config: Path, run: Path) -> "subprocess.Popen[str]":
    words = [*_STARTS[way], str(config), "--out", str(run)]
    return processes.launch(words, stderr=subprocess.STDOUT, start_new_session=True, cwd=run.parent)


def _kill_one(
    process: "subprocess.Popen[str]", run: Path, moment: int, victim: str, draw: random.Random
) -> float | None:
    """Kill a rank soon after a round (-1: the configuration is there); when that was, or None if it was too late."""
    there = run / ("config.yaml" if moment < 0 else f"round_{moment:05}.h5")
    while not _reached(run, there) and process.poll() is None:
        time.sleep(0.02)
    time.sleep(draw.random() * SOON)
    alive = sorted((rank_of(pid), pid) for pid in processes.ranks_of(process.pid))
    if len(alive) < 2 or (run / f"round_{ROUNDS:05}.h5").exists():
        return None
    chosen = alive[:1] if victim == "rank 0" else alive[1:]
    return time.monotonic() if hit([draw.choice(chosen)[1]], signal.SIGKILL) else None


def _reached(run: Path, there: Path) -> bool:
    """Whether a file is there, or a later one: old checkpoints are removed."""
    return there.exists() or max((path.name for path in run.glob("round_*.h5")), default="") > there.name
