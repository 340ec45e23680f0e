"""pflmpi's command, with a rank on each core; no checkpoint, and nothing tested before the end."""

import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import work


def main() -> None:
    """Train, and say when each round ended: the first by the clock, the others by metrics.csv."""
    of = work.WORKS[sys.argv[1]]
    config = {
        "data": {"path": str(Path(sys.argv[2]).resolve()), "split": "official"},
        "partition": {"name": "writers"},
        "model": {"name": of.model} | ({"head": "fc"} if ":" in of.model else {}),
        "algorithm": {"name": of.algorithm},
        "training": {
            "rounds": of.rounds,
            "participation": of.cohort / of.clients,
            "epochs": of.epochs,
            "batch_size": of.batch,
            "lr": work.LR,
        },
        "evaluation": {"every": 10**6},
        "checkpoint": {"every": 10**6},
    }
    with tempfile.TemporaryDirectory() as name:
        file, run = Path(name) / "config.yaml", Path(name) / "run"
        file.write_text(json.dumps(config))
        words = ["run", str(file), "--out", str(run), "--ranks", str(len(os.sched_getaffinity(0))), "--quiet"]
        with subprocess.Popen([sys.executable, "-m", "pflmpi", *words], stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not rounds(run):
                time.sleep(0.02)
            first = time.time()
        if process.returncode:
            sys.exit(process.returncode)
        print(json.dumps({"ends": list(itertools.accumulate(rounds(run)[1:], initial=first))}), flush=True)


def rounds(run: Path) -> list[float]:
    """Seconds of the rounds so far, each from the end of the one before."""
    if not (run / "metrics.csv").exists():
        return []
    with (run / "metrics.csv").open() as file:
        return [float(row["seconds"]) for row in csv.DictReader(file) if row["seconds"]]


if __name__ == "__main__":
    main()
