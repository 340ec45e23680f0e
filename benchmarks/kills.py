"""What happens when ranks are killed: how many runs end with the right digest, and how long the others take.

    python benchmarks/kills.py --server 200 --continue 100 --restart 20 --stop 20 [--out FILE]

A rank is killed with SIGKILL at a random moment between the making of the run's folder and the last round. `server`:
rank 0 of 3 under mpirun with ULFM, the others go on. `continue`: another rank of 3, likewise. `restart`: any of 3 ranks
under torchrun --max-restarts. `stop`: any but rank 0 of 4 ranks, the default, under mpirun and torchrun in turn. Right
is the digest of the undisturbed run, exit code 0 and a line of metrics per round; after `stop`, what `resume` gives.
What has not ended after 120 s hangs. Times are on this machine with whatever else it does; digests do not depend on it.
"""

import argparse
import contextlib
import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

ROUNDS = 12
SOON = 0.2  # seconds after a round of the first half; some rounds long
HANGS = 120.0  # seconds
CONFIG = {
    "seed": 3,
    "data": {"name": "digits"},
    "partition": {"name": "exdir", "clients": 12, "classes_per_client": 2, "alpha": 0.5, "min_samples": 4},
    "model": {"name": "mlp", "hidden": 32},
    "algorithm": {"name": "fedgmh"},
    "training": {"rounds": ROUNDS, "participation": 0.4, "epochs": 10, "momentum": 0.5},
    "runtime": {"device": "cpu"},
}
WAYS = ("server", "continue", "restart", "stop")
BIN = Path(sys.executable).parent
PFLMPI = [sys.executable, "-m", "pflmpi"]
ENVIRONMENT = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,sm,self",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Outcome:
    """What came of one kill: seconds from it to the noticing, to the going on and to the end of all ranks."""

    right: bool
    hung: bool
    noticed: float | None
    gone_on: float | None
    ended: float
    message: str


def main() -> None:
    """Kill as often as asked, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in WAYS:
        options.add_argument(f"--{name}", type=int, default=0, metavar="N", dest=name)
    options.add_argument("--out", type=Path)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        subprocess.run(
            [*PFLMPI, "run", config, "--out", folder / "whole", "--ranks", "1", "--quiet"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        expected = digest(folder / "whole")
        lines = [
            "| | kills | right | hung | time to detect, s | time to recover, s | time until all ended, s |",
            "|---|---|---|---|---|---|---|",
        ]
        messages: dict[str, int] = {}
        for way in WAYS:
            outcomes = []
            for number in range(getattr(asked, way)):
                one = kill(way, number, config, folder / f"{way}{number}", random.Random(asked.seed + number), expected)
                print(f"{way} {number}: {one}", file=sys.stderr, flush=True)
                outcomes.append(one)
                text = re.sub(r"\d+", "N", one.message)
                messages[text] = messages.get(text, 0) + 1
            if outcomes:
                lines.append(row(way, outcomes))
    lines += ["", "Median (worst). Messages, with how often they were printed:", ""]
    lines += [f"- {count} x `{text}`" for text, count in sorted(messages.items(), key=lambda item: -item[1])]
    text = "\n".join(lines)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


def kill(way: str, number: int, config: Path, run: Path, draw: random.Random, expected: str) -> Outcome:
    """Start a run, kill a rank at a random moment, and watch what the others do."""
    tolerant = way in ("server", "continue")
    mpi = tolerant or (way == "stop" and number % 2 == 0)
    ranks = 4 if way == "stop" else 3
    if mpi:
        settings = ["--with-ft", "ulfm", "--mca", "coll", "^han,adapt"] if tolerant else []
        start = [str(BIN / "mpirun"), *settings, "-n", str(ranks), *PFLMPI]
    else:
        restarts = ["--max-restarts=2"] if way == "restart" else []
        start = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", *restarts, "-m", "pflmpi"]
    start += ["run", str(config), "--out", str(run)]
    start += ["-s", "runtime.faults=continue"] if tolerant else []
    said = run.with_suffix(".exit")
    environment = {**ENVIRONMENT, "PFLMPI_EXIT_FILE": str(said)}
    process = subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen: queue.Queue[tuple[float, str]] = queue.Queue()
    reader = threading.Thread(target=lambda: [seen.put((time.monotonic(), line)) for line in process.stdout or ()])
    reader.start()
    begin = draw.randrange(-1, ROUNDS)
    there = run / ("config.yaml" if begin < 0 else f"round_{begin:05}.h5")
    while not there.exists() and process.poll() is None:
        time.sleep(0.005)
    time.sleep(draw.random() * SOON)
    alive = sorted(ranks_below(process.pid), key=rank_of)
    if len(alive) < ranks:  # too late
        process.wait()
        reader.join()
        return kill(way, number, config, run.with_name(f"{run.name}_again"), draw, expected)
    victim = 0 if way == "server" else draw.randrange(0 if way == "restart" else 1, ranks)
    killed = time.monotonic()
    os.kill(alive[victim], signal.SIGKILL)
    others = alive[:victim] + alive[victim + 1 :]
    ended, hung = killed, False
    while process.poll() is None:
        if way == "stop" and any(Path(f"/proc/{one}").exists() for one in others):
            ended = time.monotonic()
        if time.monotonic() - killed > HANGS:
            hung = True
            for one in [process.pid, *others]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
        time.sleep(0.01)
    reader.join()
    shown = [(moment - killed, line.strip()) for moment, line in list(seen.queue) if moment > killed]
    if way == "stop":
        subprocess.run([*PFLMPI, "resume", run, "--ranks", "1", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    else:
        ended = time.monotonic()
    died = r"ended or was|died;"
    words = {"server": died, "continue": died, "restart": r"exitcode|ended or was", "stop": r"signal 9|exitcode"}[way]
    noticed = [(after, line) for after, line in shown if re.search(words, line)]
    gone_on = [after for after, line in shown if re.search(r"goes on from" if tolerant else r"^round ", line)]
    lines = (run / "metrics.csv").read_text().splitlines()
    code = process.returncode if not tolerant else int(said.read_text()) if said.exists() else -1
    return Outcome(
        not hung and (code == 0 or way == "stop") and len(lines) == ROUNDS + 1 and digest(run) == expected,
        hung,
        noticed[0][0] if noticed else None,
        gone_on[0] if gone_on and way != "stop" else None,
        ended - killed,
        (noticed[-1][1] if noticed else "nothing")[:160],
    )


def row(way: str, outcomes: list[Outcome]) -> str:
    """Return a line of the table."""
    right, hung = sum(one.right for one in outcomes), sum(one.hung for one in outcomes)
    columns = [spread(getattr(one, name) for one in outcomes) for name in ("noticed", "gone_on")]
    last = spread(one.ended for one in outcomes) if way == "stop" else "-"
    return f"| {way} | {len(outcomes)} | {right} | {hung} | {' | '.join(columns)} | {last} |"


def spread(values: Iterable[float | None]) -> str:
    """Return median and worst."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} ({max(known):.2f})" if known else "-"


def digest(run: Path) -> str:
    """Return the digest of the newest round."""
    done = subprocess.run([*PFLMPI, "inspect", str(run), "--digest"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def ranks_below(pid: int) -> list[int]:
    """Return the processes below one that run `pflmpi`."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    below, size = {pid}, 0
    while len(below) > size:
        size = len(below)
        below |= {child for child, parent in parents.items() if parent in below}
    return [one for one in below - {pid} if b"-m\0pflmpi\0run" in command(one)]


def rank_of(pid: int) -> int:
    """Return the rank of a process, as its launcher told it."""
    found = re.search(rb"\0(?:OMPI_COMM_WORLD_RANK|RANK)=(\d+)\0", b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
    return int(found[1]) if found else -1


def command(pid: int) -> bytes:
    """Return the command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
