"""What happens when ranks are killed: how many runs end with the right digest, and how long the others take.

    python benchmarks/kills.py --continue 50 --restart 20 --stop 20 [--out FILE]

A rank other than 0 is killed with SIGKILL at a random moment. `continue`: 4 ranks under mpirun with ULFM, the others go
on. `restart`: 3 ranks under torchrun --max-restarts. `stop`: 4 ranks, the default, under mpirun and torchrun in turn.
Times are on this machine with whatever else it does; the digests do not depend on it.
"""

import argparse
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

ROUNDS = 40
SOON = 0.5  # seconds after a round of the first half; some rounds long
CONFIG = {
    "seed": 3,
    "data": {"name": "digits"},
    "partition": {"name": "exdir", "clients": 12, "classes_per_client": 2, "alpha": 0.5, "min_samples": 4},
    "model": {"name": "mlp", "hidden": 32},
    "algorithm": {"name": "fedgmh"},
    "training": {"rounds": ROUNDS, "participation": 0.4, "epochs": 10, "momentum": 0.5},
    "runtime": {"device": "cpu"},
}
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
    noticed: float | None
    gone_on: float | None
    ended: float
    message: str


def main() -> None:
    """Kill as often as asked, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("continue", "restart", "stop"):
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
            "| | kills | correct digest | time to detect, s | time to recover, s | time until all ended, s |",
            "|---|---|---|---|---|---|",
        ]
        messages: dict[str, int] = {}
        for way in ("continue", "restart", "stop"):
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
    mpi = way == "continue" or (way == "stop" and number % 2 == 0)
    ranks = 3 if way == "restart" else 4
    if mpi:
        tolerant = ["--with-ft", "ulfm", "--mca", "coll", "^han,adapt"] if way == "continue" else []
        start = [str(BIN / "mpirun"), *tolerant, "-n", str(ranks), *PFLMPI]
    else:
        restarts = ["--max-restarts=2"] if way == "restart" else []
        start = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", *restarts, "-m", "pflmpi"]
    start += ["run", str(config), "--out", str(run)]
    start += ["-s", "runtime.faults=continue"] if way == "continue" else []
    process = subprocess.Popen(start, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen: queue.Queue[tuple[float, str]] = queue.Queue()
    reader = threading.Thread(target=lambda: [seen.put((time.monotonic(), line)) for line in process.stdout or ()])
    reader.start()
    begin = draw.randrange(ROUNDS // 2)
    while not (run / f"round_{begin:05}.h5").exists():
        assert process.poll() is None, "it ended before the kill"
        time.sleep(0.005)
    time.sleep(draw.random() * SOON)
    alive = sorted(ranks_below(process.pid))
    if len(alive) < ranks:
        process.kill()
        raise SystemExit(f"the run was over before its rank could be killed: raise training.rounds ({alive})")
    victim = draw.randrange(1, ranks)
    killed = time.monotonic()
    os.kill(alive[victim], signal.SIGKILL)
    others = alive[:victim] + alive[victim + 1 :]
    ended = killed
    while process.poll() is None:
        if way == "stop" and any(Path(f"/proc/{one}").exists() for one in others):
            ended = time.monotonic()
        if time.monotonic() - killed > 180:
            process.kill()
        time.sleep(0.01)
    reader.join()
    shown = [(moment - killed, line.strip()) for moment, line in list(seen.queue) if moment > killed]
    if way == "stop":
        subprocess.run([*PFLMPI, "resume", run, "--ranks", "1", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    else:
        ended = time.monotonic()
    words = {"continue": r"ended or was|died;", "restart": r"exitcode|ended or was", "stop": r"signal 9|exitcode"}[way]
    noticed = [(after, line) for after, line in shown if re.search(words, line)]
    gone_on = [after for after, line in shown if re.search(r"go on, from" if way == "continue" else r"^round ", line)]
    return Outcome(
        digest(run) == expected,
        noticed[0][0] if noticed else None,
        gone_on[0] if gone_on and way != "stop" else None,
        ended - killed,
        (noticed[-1][1] if noticed else "nothing")[:160],
    )


def row(way: str, outcomes: list[Outcome]) -> str:
    """Return a line of the table."""
    right = sum(one.right for one in outcomes)
    columns = [spread(getattr(one, name) for one in outcomes) for name in ("noticed", "gone_on")]
    last = spread(one.ended for one in outcomes) if way == "stop" else "-"
    return f"| {way} | {len(outcomes)} | {right} | {' | '.join(columns)} | {last} |"


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


def command(pid: int) -> bytes:
    """Return the command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
