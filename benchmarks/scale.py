"""Many clients on one rank: seconds of rounds, processor time and memory of FedGMH or FedAvg, one line of a table each.

    python benchmarks/scale.py mlp:100 mlp:1000 mlp:10000 [--algorithm fedgmh] [--state memory|disk] [--participants 20]
        [--rounds 5] [--every 1000] [--folder FOLDER]

A case is MODEL:CLIENTS. Every client has 20 made-up samples (28 x 28, for resnet18 3 x 32 x 32), 10 classes, batches of
10, one epoch. All clients are tested in the first round (`--every 1`) or in the last. Memory is the most that the
process had of its own, and with the pages of files that the system may take back.
"""

import argparse
import csv
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

HEAD = (
    "| clients | model | state | participants | first round after, s | round 1, s | later ones, s | of it computing, s "
    "| processor, s | memory, with file pages, GiB | checkpoints, MiB |\n|" + "---|" * 11
)
SAMPLES = 20
GIB = 2.0**30


def main() -> None:
    """Measure the cases one after another, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="MODEL:CLIENTS")
    parser.add_argument("--algorithm", default="fedgmh")
    parser.add_argument("--state", choices=("memory", "disk"), default="memory")
    parser.add_argument("--participants", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=1, help="rounds from one evaluation to the next")
    parser.add_argument("--folder", type=Path, help="for data and runs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        print(HEAD)
        for case in options.cases:
            print(measure(options, *case.split(":"), Path(name)), flush=True)


def measure(options: argparse.Namespace, model: str, clients: str, folder: Path) -> str:
    """One line of the table."""
    count, run, path = int(clients), folder / f"{model}-{clients}", folder / f"{model}-{clients}.yaml"
    config = {
        "data": {"path": str(data(count, (3, 32, 32) if model == "resnet18" else (1, 28, 28), folder))},
        "partition": {"name": "writers"},
        "model": {"name": model, **({"hidden": 100} if model == "mlp" else {})},
        "algorithm": {"name": options.algorithm},
        "training": {"rounds": options.rounds, "participation": options.participants / count, "lr": 0.01},
        "evaluation": {"every": options.every},
        "runtime": {"device": "cpu", "state": options.state},
    }
    path.write_text(yaml.safe_dump(config))
    first, processor, own, whole = watch(path, run)
    rounds = rounds_of(run)
    later = statistics.median(float(line["seconds"]) for line in rounds[1:-1])
    computing = statistics.median(float(line["compute_seconds"]) for line in rounds[1:-1])
    disk = sum(file.stat().st_size for file in run.rglob("*.h5")) / 2**20
    cells = (clients, model, options.state, options.participants, f"{first:.1f}", f"{float(rounds[0]['seconds']):.2f}")
    more = (
        f"{later:.2f}",
        f"{computing:.2f}",
        f"{processor:.1f}",
        f"{own / GIB:.2f}, {whole / GIB:.2f}",
        f"{disk:.0f}",
    )
    return f"| {' | '.join(map(str, (*cells, *more)))} |"


def watch(config: Path, run: Path, *words: str) -> tuple[float, float, int, int]:
    """Runs a configuration on one rank: seconds to its first round, processor seconds, and peak memory.

    Memory in bytes, the process's own and with pages of files.
    """
    command = [sys.executable, "-m", "pflmpi", "run", str(config), "--out", str(run), "--ranks", "1", "--quiet", *words]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    first, own, whole = 0.0, 0, 0
    while process.poll() is None:
        if not first and len(rounds_of(run)) > 0:
            first = time.monotonic() - began
        now = memory(process.pid)
        own, whole = max(own, now[0]), max(whole, now[1])
        time.sleep(0.02)
    assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return first, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, own, whole


def data(clients: int, shape: tuple[int, ...], folder: Path) -> Path:
    """A file with random samples of so many clients."""
    path, rng = folder / f"{clients}x{shape[0]}.npz", np.random.default_rng(0)
    if not path.exists():
        images = rng.integers(0, 256, (SAMPLES * clients, *shape), np.uint8)
        labels = rng.integers(0, 10, SAMPLES * clients)
        np.savez(path, x=images, y=labels, client=np.repeat(np.arange(clients), SAMPLES))
    return path


def rounds_of(run: Path) -> list[dict[str, str]]:
    """The lines of metrics.csv."""
    try:
        with (run / "metrics.csv").open() as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []


def memory(pid: int) -> tuple[int, int]:
    """Bytes of a process: its own, and with those of mapped files; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "VmRSS"))}
    return sizes.get("RssAnon", 0), sizes.get("VmRSS", 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
