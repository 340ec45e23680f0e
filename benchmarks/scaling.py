"""Strong and weak scaling and packing on this machine's cores: digits `mlp` and MNIST `cnn`, FedGMH and FedAvg.

    python benchmarks/scaling.py --folder DIR [--repeats 3] [--rounds 6] [--only PATTERN] [--out results/scaling.md]

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
from pflmpi.scaling.records import hardware
from pflmpi.scaling.results import Results, results

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


def measure(name: str, mode: str, raw: dict[str, Any], ranks: str, asked: argparse.Namespace) -> Results:
    """Measure what is missing of an experiment."""
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = asked.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**raw, "runtime": {"device": "cpu"}}))
    words = ["scale", str(path), "--ranks", ranks, "--mode", mode, "--out", str(asked.folder / name)]
    words += ["--repeats", str(asked.repeats), "--rounds", str(asked.rounds)]
    subprocess.run([sys.executable, "-m", "pflmpi", *words], stdout=subprocess.DEVNULL)
    return results(asked.folder / name)


def lines(name: str, found: Results) -> Iterator[str]:
    """A line for each point."""
    for point in found.points:
        if not point.runs:
            yield f"| {name} | {point.ranks} | failed |" + " |" * 6
            continue
        low, high = point.spread
        parts = ", ".join(f"{seconds:.3f}" for seconds in point.parts.values())
        cells = (
            name,
            point.ranks,
            f"{point.seconds:.3f} ({low:.3f}-{high:.3f})",
            f"{found.speed_up(point):.2f}",
            f"{found.efficiency(point):.2f}",
            parts,
            f"{point.most('memory_rank_bytes') / 2**20:.0f}",
            f"{point.wire_bytes / 1e3:.0f}",
            "same" if point.same_bits else "different",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", default="*")
    parser.add_argument("--load", default="on an otherwise idle machine", help="said of the machine in the text")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    cores = len(machine.cores())
    ranks = ",".join(str(2**power) for power in range(cores.bit_length()) if 2**power <= cores)
    table, place = [], ""
    for name, mode, raw in experiments(asked.only):
        found = measure(name, mode, raw, ranks, asked)
        new = list(lines(name, found))
        print("\n".join(new), flush=True)
        table += new
        if found.measured:
            known = found.measured[0].runs[0].record
            place = f"{hardware(known)}; PyTorch {known['torch']}, commit {known['commit']}"
    text = [
        "# Scaling on one machine",
        "",
        f"`python benchmarks/scaling.py --folder DIR --repeats {asked.repeats} --rounds {asked.rounds} "
        "--out results/scaling.md`, "
        f"{asked.load}: {place}.",
        f"{CLIENTS} clients on one rank with as many samples each, {asked.repeats} runs of each point in turns, "
        f"medians of {asked.rounds - 1} rounds, the first left out. See [docs/scaling.md](../docs/scaling.md).",
        "",
        HEAD,
        "|---" * (HEAD.count("|") - 1) + "|",
        *table,
    ]
    if asked.out:
        _, section, rest = asked.out.read_text().partition("\n## ") if asked.out.exists() else ("", "", "")
        asked.out.write_text("\n".join(text) + "\n" + section + rest)  # the sections are other measurements


if __name__ == "__main__":
    main()
