"""Predicted versus measured: what `pflmpi plan` says and what a run takes, in bytes between ranks, memory and seconds.

    python benchmarks/plan.py [--runs 3]

Memory: the most that all ranks, and the largest, had resident at any time (VmHWM). Seconds, which `plan` only
estimates: the median over rounds, after the first, of each run; then the median over runs.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from pflmpi import machine
from pflmpi.config import load as configuration
from pflmpi.forecast.forecast import Resources, predict
from pflmpi.store import metrics_file

ROUNDS, WARM = 12, 1
MLP, WIDE, CNN = {"name": "mlp", "hidden": 100}, {"name": "mlp", "hidden": 14000}, {"name": "cnn", "hidden": 512}
CASES = [
    ("fedgmh", MLP, 1),
    ("fedgmh", MLP, 3),
    ("fedavg", WIDE, 1),
    ("fedavg", WIDE, 3),
    ("fedavg", WIDE, 5),
    ("apfl", WIDE, 3),
    ("fedamp", WIDE, 3),
    ("fedavg", CNN, 1),
    ("fedgmh", CNN, 3),
    ("fedfcd", CNN, 3),
]


def settings(algorithm: str, model: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a case: the embedded digits, 20 clients."""
    return {
        "data": {"name": "digits"},
        "partition": {"name": "exdir", "clients": 20, "classes_per_client": 2, "alpha": 0.5},
        "model": {**model, **({"kernel": 3, "padding": 1} if model is CNN else {})},
        "algorithm": {"name": algorithm},
        "training": {"rounds": ROUNDS, "participation": 0.5, "epochs": 2, "batch_size": 20, "lr": 0.05},
        "runtime": {"device": "cpu"},
    }


def predict_apart(raw: dict[str, Any], ranks: int) -> tuple[float, float, list[float]]:
    """Forecasts in a process of its own: seconds of a round, bytes between ranks, and memory of each rank."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_predict, raw, ranks).result()


def _predict(raw: dict[str, Any], ranks: int) -> tuple[float, float, list[float]]:
    here = Resources(
        ranks=ranks,
        nodes=1,
        gpus=0,
        cores=len(machine.cores()),
        memory=machine.memory().total,
        gpu_memory=None,
        delay=None,
        rate=None,
    )
    forecast = predict(configuration.parse(raw), here)
    assert forecast.seconds is not None
    wire = sum(wire for _, _, wire in forecast.bytes_per_round())
    return forecast.seconds.round, wire, [rank.total for rank in forecast.memory]


def measure(raw: dict[str, Any], ranks: int, folder: Path) -> tuple[float, float, list[float]]:
    """Measures a run: seconds of a round, bytes between ranks, and resident bytes of all ranks and of the largest."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "pflmpi", "run", f"{folder}/config.yaml", "--out", f"{folder}/run", "--quiet"]
    subprocess.run([*command, f"--ranks={ranks}"], stdout=subprocess.DEVNULL, check=True)
    lines = metrics_file.read(folder / "run")
    seconds = statistics.median(float(line["seconds"]) for line in lines[WARM:])
    wire = sum(int(line["wire_up_bytes"]) + int(line["wire_down_bytes"]) for line in lines) / len(lines)
    return seconds, wire, [max(float(line[name]) for line in lines) for name in ("memory_bytes", "memory_rank_bytes")]


def line(name: str, model: dict[str, Any], ranks: int, runs: int, folder: Path) -> tuple[str, list[float]]:
    """Return the line of a case, and its ratios of memory: all ranks, the largest."""
    raw = settings(name, model)
    predicted_seconds, predicted_bytes, of_ranks = predict_apart(raw, ranks)
    measured = [measure(raw, ranks, folder) for _ in range(runs)]
    seconds = statistics.median(seconds for seconds, _, _ in measured)
    memory = [statistics.median(resident[place] for _, _, resident in measured) for place in range(2)]
    predicted_memory = [sum(of_ranks), max(of_ranks)]
    ratios = [has / expected for has, expected in zip(memory, predicted_memory, strict=True)]
    cells = [
        f"{name}, {model['name']} {model['hidden']}",
        str(ranks),
        f"{predicted_bytes / 1e3:.1f}, {measured[0][1] / 1e3:.1f}",
    ]
    for has, expected, ratio in zip(memory, predicted_memory, ratios, strict=True):
        cells += [f"{expected / 2**20:.0f}, {has / 2**20:.0f}", f"{ratio:.2f}"]
    return f"| {' | '.join(cells)} | {predicted_seconds:.3f}, {seconds:.3f} |", ratios


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    head = [
        f"Predicted versus measured: digits, 20 clients, {ROUNDS} rounds, {os.cpu_count()} cores; medians of "
        f"{options.runs} runs. Pairs are predicted, measured; the ratio is measured / predicted.",
        "",
        "| experiment | ranks | kB between ranks | all ranks, MB | ratio | largest rank, MB | ratio | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(head), flush=True)
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for case in CASES:
            text, ratios = line(*case, options.runs, Path(name))
            print(text, flush=True)
            memory += ratios
    print(f"\nMedian ratio (range): memory {spread(memory)}.")


def spread(ratios: list[float]) -> str:
    """Return the median and the range of some ratios."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
