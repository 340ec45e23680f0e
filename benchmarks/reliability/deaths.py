"""Ranks that are killed where the others go on: under mpirun with ULFM, or started again by torchrun."""

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
from reliability.moments import CONFIG, hit, rank_of
from reliability.trials import PATIENCE, Result, Trial, command, compare, digest

ROUNDS = 12
RANKS = 3
SOON = 0.2  # seconds after a round of the first half; some rounds long
_ULFM = ["--with-ft", "ulfm", "--mca", "coll", "^han,adapt"]


class Deaths:
    """A configuration, and the digest of its undisturbed run."""

    def __init__(self, folder: Path) -> None:
        self._config = folder / "config.yaml"
        training = CONFIG["training"] | {"rounds": ROUNDS, "epochs": 6}
        self._config.write_text(yaml.safe_dump(CONFIG | {"model": {"name": "mlp", "hidden": 32}, "training": training}))
        command("run", self._config, "--out", folder / "whole", "--ranks", 1, "--quiet")
        self._expected = digest(folder / "whole")

    def rank_0(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """SIGKILL of rank 0 of 3 under mpirun."""
        return self._kill("mpirun", [0], draw, folder)

    def another_rank(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """SIGKILL of another rank."""
        return self._kill("mpirun", [1, 2], draw, folder)

    def restart(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """SIGKILL of any rank under torchrun."""
        return self._kill("torchrun", [0, 1, 2], draw, folder)

    def _kill(self, way: str, ranks: list[int], draw: random.Random, folder: Path) -> Trial:
        """Kill a rank between the making of the folder and the last round, and watch what the others do."""
        for again in itertools.count():
            run, victim = folder / f"run{again}", draw.choice(ranks)
            process = _start(way, self._config, run)
            shown = _Output(process)
            begin = draw.randrange(-1, ROUNDS)
            there = run / ("config.yaml" if begin < 0 else f"round_{begin:05}.h5")
            while not there.exists() and process.poll() is None:
                time.sleep(0.005)
            time.sleep(draw.random() * SOON)
            killed = time.monotonic()
            pids = {rank_of(pid): pid for pid in processes.ranks_of(process.pid)}
            done = (run / f"round_{ROUNDS:05}.h5").exists()
            begun = not done and len(pids) == RANKS and hit([pids[victim]], signal.SIGKILL)
            result = shown.end()
            if begun:  # and not too late
                trial = Trial(f"{way} rank {victim}, {f'after round {begin}' if begin >= 0 else 'before round 0'}")
                trial.seconds = shown.first_after(killed, r"goes on from" if way == "mpirun" else r"^round ")
                self._judge(trial, run, result, way)
                return trial
        raise AssertionError

    def _judge(self, trial: Trial, run: Path, result: Result, way: str) -> None:
        """Note what came of it: right are the exit code, the digest, and a line of metrics for each round."""
        trial.saw(result)
        said = run.with_suffix(".exit")
        code = result.code
        if way == "mpirun" and code is not None:  # whose own code says nothing under ULFM
            code = int(said.read_text()) if said.exists() else -1
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


def _start(way: str, config: Path, run: Path) -> "subprocess.Popen[str]":
    words = ["run", str(config), "--out", str(run)]
    if way == "mpirun":
        start = [str(processes.BIN / "mpirun"), *_ULFM, "-n", str(RANKS), *processes.PFLMPI, *words]
        start += ["-s", "runtime.faults=continue"]
    else:
        start = [str(processes.BIN / "torchrun"), "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=2"]
        start += ["-m", "pflmpi", *words]
    environment = processes.ENVIRONMENT | {"PFLMPI_EXIT_FILE": str(run.with_suffix(".exit"))}
    return processes.launch(start, env=environment, stderr=subprocess.STDOUT, start_new_session=True)
