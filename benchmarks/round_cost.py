"""What a round costs when there is nothing to compute: milliseconds a round on 1 and 2 ranks.

    python benchmarks/round_cost.py [--rounds 400] [--repeats 3]

FedAvg with `logistic` (2.5 KiB), 1,000 clients of digits, 10 a round, whose clients send back what they receive. No
test and no checkpoint before the end. Medians of `seconds` in metrics.csv; of the repeats the best, and their median in
brackets.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

IDLE = '''"""FedAvg whose clients do not train."""

import torch

from pflmpi.algorithms.fedavg import FedAvg


class Idle(FedAvg):
    """Sends back what it receives."""

    summary = "does nothing"

    def client_update(self, task, client, down, data):
        return client, {"model": down["model"]}
'''

CONFIG = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 1000},
    "model": {"name": "logistic"},
    "training": {"participation": 0.01, "epochs": 1, "batch_size": 10, "lr": 0.01},
    "evaluation": {"every": 10**6},
    "checkpoint": {"every": 10**6},
}
WARM_UP = 50  # rounds that do not count
COLUMNS = {"a round": "seconds", "computing": "compute_seconds", "exchange": "exchange_seconds"}  # of metrics.csv


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}  # by the number of ranks
    for _ in range(options.repeats):
        for ranks, of_ranks in runs.items():
            of_ranks.append(milliseconds(ranks, options.rounds))
    columns = list(COLUMNS)
    print("| ranks |", " | ".join(columns), "|\n|" + "---|" * (1 + len(columns)))
    for ranks, of_ranks in runs.items():
        best = min(of_ranks, key=lambda run: run[columns[0]])
        median = {column: statistics.median(run[column] for run in of_ranks) for column in columns}
        cells = (f"{best[column]:.2f} ({median[column]:.2f})" for column in columns)
        print(f"| {ranks} |", " | ".join(cells), "|")


def milliseconds(ranks: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds of a run, by the title of the column."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "idle.py").write_text(IDLE)
        training = {**CONFIG["training"], "rounds": rounds}
        config = {**CONFIG, "algorithm": {"name": f"{folder / 'idle.py'}:Idle"}, "training": training}
        (folder / "config.yaml").write_text(json.dumps(config))
        words = ["run", str(folder / "config.yaml"), "--out", str(folder / "run"), "--ranks", str(ranks), "--quiet"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        subprocess.run(
            [sys.executable, "-m", "pflmpi", *words], env=environment, check=True, cwd=folder, stdout=subprocess.DEVNULL
        )
        with (folder / "run" / "metrics.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))[WARM_UP:-1]
    return {title: 1000 * statistics.median(float(line[key]) for line in lines) for title, key in COLUMNS.items()}


if __name__ == "__main__":
    main()
