"""Strong and weak scaling and packing on this machine's cores: digits `mlp` and MNIST `cnn`, FedGMH and FedAvg.

    python benchmarks/scaling.py --folder DIR [--repeats 3] [--rounds 6] [--only PATTERN]

Runs `pflmpi scale` for each, in DIR/NAME; what is measured there is not measured again. MNIST is read from PFLMPI_DATA.
The clients hold as many samples each, so that what is lost is not lost to unequal clients.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from pflmpi import machine
from pflmpi.scaling.results import Results, read_results

WORK: dict[str, dict[str, Any]] = {
    "digits-mlp": {
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": 100},
        "training": {"participation": 1.0, "epochs": 60, "batch_size": 10, "lr": 0.05},
    },
    "mnist-cnn": {
        "data": {"name": "mnist", "limit": 8000},
        "model": {"name": "cnn", "hidden": 128},
        "training": {"participation": 0.5, "epochs": 1, "batch_size": 10, "lr": 0.01},
    },
}
ALGORITHMS, MODES = ("fedgmh", "fedavg"), ("strong", "weak", "packing")
CLIENTS = 20
HEAD = "| experiment | ranks | seconds per round (quartiles) | speed-up | efficiency | compute, evaluation, exchange, "
HEAD += "waiting, checkpoint, s | largest rank, MiB | bytes between ranks, kB | bits |"


def experiments(pattern: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, mode and configuration of each experiment whose name matches."""
    for work, sections in WORK.items():
        for algorithm in ALGORITHMS:
            for mode in MODES:
                name = f"{work}-{algorithm}-{mode}"
                if fnmatchcase(name, pattern):
                    partition = {"name": "iid", "clients": CLIENTS}
                    yield name, mode, {**sections, "partition": partition, "algorithm": {"name": algorithm}}


def measure(name: str, mode: str, raw: dict[str, Any], ranks: str, options: argparse.Namespace) -> Results:
    """Measure what is missing of an experiment."""
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**raw, "runtime": {"device": "cpu"}}))
    words = ["scale", str(path), "--ranks", ranks, "--mode", mode, "--out", str(options.folder / name)]
    words += ["--repeats", str(options.repeats), "--rounds", str(options.rounds)]
    subprocess.run([sys.executable, "-m", "pflmpi", *words], stdout=subprocess.DEVNULL)
    return read_results(options.folder / name)


def lines(name: str, measured: Results) -> Iterator[str]:
    """A line for each point."""
    for point in measured.points:
        if not point.runs:
            yield f"| {name} | {point.ranks} | failed |" + " |" * 6
            continue
        low, high = point.spread
        parts = ", ".join(f"{seconds:.3f}" for seconds in point.parts.values())
        cells = (
            name,
            point.ranks,
            f"{point.seconds:.3f} ({low:.3f}-{high:.3f})",
            f"{measured.speed_up(point):.2f}",
            f"{measured.efficiency(point):.2f}",
            parts,
            f"{point.most('memory_rank_bytes') / 2**20:.0f}",
            f"{point.wire_bytes / 1e3:.0f}",
            "same" if point.same_bits else "different",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", default="*")
    options = parser.parse_args()
    cores = len(machine.cores())
    ranks = ",".join(str(2**power) for power in range(cores.bit_length()) if 2**power <= cores)
    print(HEAD, "|---" * (HEAD.count("|") - 1) + "|", sep="\n")
    for name, mode, raw in experiments(options.only):
        print("\n".join(lines(name, measure(name, mode, raw, ranks, options))), flush=True)


if __name__ == "__main__":
    main()
