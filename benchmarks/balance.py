"""Clients spread over ranks by their steps and by their measured seconds: seconds of a round, waiting, same bits.

    python benchmarks/balance.py [--ranks 2] [--repeats 3] [--rounds 8] [--out FILE.md]

FedProto on MNIST (PFLMPI_DATA), 20 clients with as many samples each, whose models are an MLP and a CNN in turn: as
many steps, but not as many seconds. Clients keep their models, so they get homes by measured seconds when the run is
resumed: the rounds after that are compared, with `runtime.balance` samples and measured in turns.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

CONFIG = {
    "seed": 0,
    "data": {"name": "mnist", "limit": 8000},
    "partition": {"name": "iid", "clients": 20},
    "model": [{"name": "mlp", "hidden": 512}, {"name": "cnn", "hidden": 512}],
    "algorithm": {"name": "fedproto"},
    "training": {"participation": 1.0, "epochs": 1, "batch_size": 10, "lr": 0.01},
    "evaluation": {"every": 1000},
    "runtime": {"device": "cpu", "executor": "loop"},
}
WARM_UP = 1  # rounds after the restart that do not count


def main() -> None:
    """Measure, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--rounds", type=int, default=8, help="before the restart, and after it")
    options.add_argument("--out", type=Path)
    asked = options.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"samples": [], "measured": []}
    digests = set()
    with tempfile.TemporaryDirectory() as name:
        for repeat in range(asked.repeats):
            for balance, measured in found.items():
                run = Path(name) / f"{balance}-{repeat}"
                measured.append(seconds(run, balance, asked.ranks, asked.rounds))
                digests.add(pflmpi("inspect", str(run), "--digest").split()[0])
    lines = [
        "| balanced by | seconds a round, each repeat | median | waiting for the slowest rank, s |",
        "|---|---|---|---|",
    ]
    for balance, measured in found.items():
        rounds, waited = zip(*measured, strict=True)
        each = ", ".join(f"{one:.3f}" for one in rounds)
        lines.append(f"| {balance} | {each} | {statistics.median(rounds):.3f} | {statistics.median(waited):.3f} |")
    before, after = (statistics.median(one for one, _ in measured) for measured in found.values())
    lines.append(
        f"\nBy samples / by measured seconds: {before / after:.2f}; digests: {len(digests)} (1: the same bits)."
    )
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n")


def seconds(run: Path, balance: str, ranks: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a round after the restart, and of its waiting."""
    config = run.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(CONFIG))
    ours = ["--ranks", str(ranks), "--quiet"]
    settings = ["-s", f"training.rounds={rounds}", "-s", f"runtime.balance={balance}"]
    pflmpi("run", str(config), "--out", str(run), *ours, *settings)
    pflmpi("resume", str(run), *ours, "-s", f"training.rounds={2 * rounds}")
    with (run / "metrics.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if int(line["round"]) > rounds + WARM_UP]
    took, waited = ([float(line[key]) for line in lines] for key in ("seconds", "waiting_seconds"))
    return statistics.median(took), statistics.median(waited)


def pflmpi(*words: str) -> str:
    """What a command prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "pflmpi", *words], env=environment, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode()


if __name__ == "__main__":
    main()
