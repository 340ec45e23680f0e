"""Ranks that are killed where the launcher starts all again."""

import itertools
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

import processes
from reliability.moments import CONFIG, hit, rank_of
from reliability.trials import PATIENCE, Result, Trial, command, compare, digest

ROUNDS = 16
SOON = 0.2  # seconds after a round within which a kill falls; some rounds long


class Deaths:
    """A configuration, and the digest of its undisturbed run."""

    def __init__(self, folder: Path) -> None:
        self._config = folder / "config.yaml"
        training = CONFIG["training"] | {"rounds": ROUNDS, "epochs": 6}
        self._config.write_text(yaml.safe_dump(CONFIG | {"model": {"name": "mlp", "hidden": 32}, "training": training}))
        command("run", self._config, "--out", folder / "whole", "--ranks", 1, "--quiet")
        self._expected = digest(folder / "whole")

    def restarted(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """Rank 0 or another one of 3 under torchrun dies."""
        return self._kill("torchrun", 3, draw.choice(["0", "1"]), draw, folder)

    def _kill(self, way: str, ranks: int, victims: str, draw: random.Random, folder: Path) -> Trial:
        """Kill ranks between the making of the folder and the last round, and watch what the others do.

        Args:
            victims: for each kill "0" for the rank that is first by then, "1" for another.
        """
        for again in itertools.count():
            run = folder / f"run{again}"
            moments = sorted(draw.sample(range(-1, ROUNDS), len(victims)))
            process = _start(way, ranks, self._config, run)
            shown = _Output(process)
            killed = [
                _kill_one(process, run, moment, victim, draw) for moment, victim in zip(moments, victims, strict=True)
            ]
            result = shown.end()
            if all(killed):  # and none too late
                names = ["rank 0" if victim == "0" else "another rank" for victim in victims]
                trial = Trial(f"{way}, {', '.join(map('{} after round {}'.format, names, moments))}")
                after = [shown.first_after(moment, r"^round ") for moment in killed if moment]
                trial.seconds = max((seconds for seconds in after if seconds is not None), default=None)
                self._judge(trial, run, result, way)
                return trial
        raise AssertionError

    def _judge(self, trial: Trial, run: Path, result: Result, way: str) -> None:
        """Note what came of it: right are the exit code, the digest, and a line of metrics for each round."""
        trial.saw(result)
        code = result.code
        compare(trial, run, Result(code, ""), self._expected)
        lines = (run / "metrics.csv").read_text().splitlines()
        trial.labels |= {"wrong bits"} if code == 0 and len(lines) != ROUNDS + 1 else set()


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


def _start(way: str, ranks: int, config: Path, run: Path) -> "subprocess.Popen[str]":
    words = ["run", str(config), "--out", str(run)]
    start = [str(processes.BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=2"]
    start += ["-m", "pflmpi", *words]
    environment = processes.ENVIRONMENT | {"PFLMPI_EXIT_FILE": str(run.with_suffix(".exit"))}
    return processes.launch(start, env=environment, stderr=subprocess.STDOUT, start_new_session=True)


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
    chosen: Sequence[tuple[int, int]] = alive[:1] if victim == "0" else alive[1:]
    return time.monotonic() if hit([draw.choice(chosen)[1]], signal.SIGKILL) else None


def _reached(run: Path, there: Path) -> bool:
    """Whether a file is there, or a later one: old checkpoints are removed."""
    return there.exists() or max((path.name for path in run.glob("round_*.h5")), default="") > there.name
