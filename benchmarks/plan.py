"""Predicted versus measured: what `pflmpi plan` says and what a run takes, in bytes between ranks, memory and seconds.

    python benchmarks/plan.py [--runs 3] [--out FILE]

Memory: the most that a rank had resident at any time (VmHWM), the largest rank but rank 0, and rank 0. Seconds, which
`plan` only estimates: the median over rounds, after the first, of each run; then the median over runs.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from pflmpi import machine
from pflmpi.config import load as configuration
from pflmpi.forecast.forecast import Resources, predict
from pflmpi.store.metrics import metrics_file

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


def predicted(raw: dict[str, Any], ranks: int) -> tuple[float, float, list[float]]:
    """What `pflmpi plan` says in a process of its own: seconds of a round, bytes between ranks, and of each rank."""
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


def taken(raw: dict[str, Any], ranks: int, folder: Path) -> tuple[float, float, list[float]]:
    """Return the seconds of a round, bytes between ranks, and the most bytes resident of each rank, of one run."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "pflmpi", "run", f"{folder}/config.yaml", "--out", f"{folder}/run", "--quiet"]
    started = subprocess.Popen([*command, f"--ranks={ranks}"], stdout=subprocess.DEVNULL)
    most: dict[int, int] = {}
    while started.poll() is None:
        for pid in (started.pid, *children(started.pid)):
            for rank, high in resident(pid, alone=ranks == 1):
                most[rank] = max(most.get(rank, 0), high)
        time.sleep(0.05)
    assert started.returncode == 0, f"the run ended with {started.returncode}"
    lines = metrics_file.read(folder / "run")
    seconds = statistics.median(float(line["seconds"]) for line in lines[WARM:])
    wire = sum(int(line["wire_up_bytes"]) + int(line["wire_down_bytes"]) for line in lines) / len(lines)
    return seconds, wire, [float(most[rank]) for rank in range(ranks)]


def children(pid: int) -> list[int]:
    """Return the processes below one."""
    try:
        direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [each for child in direct for each in (child, *children(child))]


def resident(pid: int, alone: bool) -> list[tuple[int, int]]:
    """Return the rank of a process and the most bytes that it ever had; nothing for one that is no rank."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        rank = [int(word[5:]) for word in environment if word.startswith(b"RANK=")]
        return [(0 if alone else rank[0], 1024 * int(status["VmHWM"].split()[0]))] if alone or rank else []
    except (OSError, KeyError):  # it has ended
        return []


def line(name: str, model: dict[str, Any], ranks: int, runs: int, folder: Path) -> tuple[str, list[float]]:
    """Return the line of a case, and its ratios: seconds, rank 0, the other ranks."""
    raw = settings(name, model)
    round_seconds, bytes_said, said = predicted(raw, ranks)
    found = [taken(raw, ranks, folder) for _ in range(runs)]
    seconds = statistics.median(one for one, _, _ in found)
    memory = [statistics.median(one[rank] for _, _, one in found) for rank in range(ranks)]
    ratios = [seconds / round_seconds, memory[0] / said[0]]
    ratios += [max(memory[1:]) / max(said[1:])] if ranks > 1 else []
    text = f"{model['name']} {model['hidden']}"
    others = f"{max(said[1:]) / 2**20:.0f}, {max(memory[1:]) / 2**20:.0f}" if ranks > 1 else "-"
    return (
        f"| {name}, {text} | {ranks} | {bytes_said / 1e3:.1f}, {found[0][1] / 1e3:.1f} | "
        f"{said[0] / 2**20:.0f}, {memory[0] / 2**20:.0f} | {ratios[1]:.2f} | {others} | "
        f"{f'{ratios[2]:.2f}' if ranks > 1 else '-'} | {round_seconds:.3f}, {seconds:.3f} |"
    ), ratios


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--out", type=Path)
    asked = options.parse_args()
    lines = [
        f"Predicted versus measured: digits, 20 clients, {ROUNDS} rounds, {os.cpu_count()} cores; medians of "
        f"{asked.runs} runs. Pairs are predicted, measured; the ratio is measured / predicted.",
        "",
        "| experiment | ranks | kB between ranks | rank 0, MB | ratio | largest other rank, MB | ratio | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    seconds, memory = [], []
    with tempfile.TemporaryDirectory() as name:
        for case in CASES:
            text, ratios = line(*case, asked.runs, Path(name))
            print(text, flush=True)
            lines.append(text)
            seconds.append(ratios[0])
            memory += ratios[1:]
    lines += ["", f"Median ratio (range): seconds {spread(seconds)}; memory {spread(memory)}."]
    print("\n".join(lines[-2:]))
    if asked.out:
        asked.out.write_text("\n".join(["# Accuracy of `plan`", "", *lines]) + "\n")


def spread(ratios: list[float]) -> str:
    """Return the median and the range of some ratios."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
