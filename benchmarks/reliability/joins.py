"""Ranks join a run at random moments: under every launcher, several at once or one by one."""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

import processes
from pflmpi.store.metrics import metrics_file
from reliability.trials import PATIENCE, Begun, Result, Trial, begin, command, compare, digest

ROUNDS = 16
CONFIG = {
    "seed": 3,
    "data": {"name": "digits"},
    "partition": {"name": "exdir", "clients": 12, "classes_per_client": 2, "alpha": 0.5, "min_samples": 4},
    "model": {"name": "mlp", "hidden": 64},
    "training": {"rounds": ROUNDS, "participation": 0.5, "epochs": 3, "momentum": 0.5},
    "runtime": {"device": "cpu", "timeout": 120},
}
ALGORITHMS = ("fedgmh", "ditto")  # whose clients keep nothing, and keep a model
WAYS = (("alone", 1), ("alone", 1), ("alone", 1), ("alone", 2), ("mpi", 2), ("torchrun", 2))  # and ranks of the run
SOON = 0.1  # seconds after a round: a round or two
STILL = 1.1  # seconds: a run looks for others once a second


class Joins:
    """Configurations, and the digest of the undisturbed run of each."""

    def __init__(self, folder: Path) -> None:
        self._configs = {name: folder / f"{name}.yaml" for name in ALGORITHMS}
        self._expected = {}
        for name, path in self._configs.items():
            path.write_text(yaml.safe_dump({**CONFIG, "algorithm": {"name": name}}))
            command("run", path, "--out", folder / name, "--ranks", 1, "--quiet", seconds=600)
            self._expected[name] = digest(folder / name)

    def join(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """One to three processes join, in one launch or each by itself.

        The run stands still while they start, so that a short one will do.
        """
        (way, ranks), name, run = draw.choice(WAYS), draw.choice(ALGORITHMS), folder / "run"
        batches = draw.choice([[1], [2], [3], [1, 1], [1, 1, 1], [2, 1]])
        trial = Trial(f"{way} {ranks} + {' + '.join(map(str, batches))}, {name}")
        pid, end = _start(way, ranks, self._configs[name], run)
        joiners: list[Begun] = []
        try:
            for batch in batches:
                _await(run, draw.randrange(len(joiners), ROUNDS - 8 + len(joiners)))
                time.sleep(draw.random() * SOON)
                joiners += _join(run, processes.ranks_of(pid) or [pid], batch)
        finally:
            codes = [trial.saw(joiner.end()).code for joiner in joiners]
            result = trial.saw(end())
        compare(trial, run, result, self._expected[name])
        now = yaml.safe_load((run / "config.yaml").read_text())["recorded"]["ranks"]
        rows = [line["round"] for line in metrics_file.read(run)]
        trial.what += f", {now - ranks} joined"
        well = now > ranks and not any(codes) and rows == [str(one + 1) for one in range(ROUNDS)]
        trial.labels |= set() if well else {"other"}
        return trial


def _start(way: str, ranks: int, config: Path, run: Path) -> tuple[int, Callable[[], Result]]:
    """Start a run: its process, and what waits for its end."""
    words = ["run", str(config), "--out", str(run), "--quiet"]
    if ranks == 1:
        begun = begin(*words, "--ranks", 1)
        return begun.child, begun.end
    alone = ["--ranks", str(ranks)] if way == "alone" else []
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # which `end` closes
    process = processes.launch([*processes.start_way(way, ranks), *words, *alone], stdout=output, stderr=output)

    def end() -> Result:
        code: int | None = None
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            processes.kill_all(process.pid)
            process.wait()
        with output:
            output.seek(0)
            return Result(code, output.read())

    return process.pid, end


def _await(run: Path, round: int) -> None:
    """Wait for the end of a round, or for the making of the run if it is 0."""
    metrics, end = run / "metrics.csv", time.monotonic() + PATIENCE
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > round) and time.monotonic() < end:
        time.sleep(0.002)


def _join(run: Path, ranks: list[int], size: int) -> list[Begun]:
    """Start processes of one launch that join a run, which stands still until they have asked."""
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    still = time.monotonic() + STILL
    joiners = [begin("join", run, environment=_launch(one, size)) for one in range(size)]
    end = time.monotonic() + PATIENCE / 4
    while len(list(run.glob("join/*.json"))) < size and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(max(still - time.monotonic(), 0.0))
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    return joiners


def _launch(number: int, size: int) -> dict[str, str]:
    """What torchrun would set for the processes of one launch."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "joining"}
    return {**shared, "RANK": str(number), "LOCAL_RANK": str(number)} if size > 1 else {}
