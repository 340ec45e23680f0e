"""A report over many long runs, and over runs of large models: seconds and memory, beside their floor.

    python benchmarks/report.py [--runs 100] [--rounds 300] [--data FOLDER] [--out FILE]

Four algorithms are run for so many rounds with all checkpoints kept; links to these make the many. With --data, a
folder with CIFAR-10, also a run of 20 whole ResNet-18 and one of 500 clients. The floor is what any program must do
that draws so many figures with matplotlib: to import it, NumPy and h5py, and to save as many plain ones as PNG and SVG.
The goal is less than a minute for 100 runs of 300 rounds.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ALGORITHMS = ("fedgmh", "pfedafe", "fedproto", "local")
PFLMPI = Path(sys.executable).parent / "pflmpi"
HEAD = "| runs | on disk, MB | figures | report, s | lower bound, s | ratio | peak memory, MB | page, MB |"
FLOOR = """
import io, sys, h5py, numpy
from matplotlib.figure import Figure
for _ in range(int(sys.argv[1])):
    figure = Figure(figsize=(8, 4.2), dpi=100, layout="constrained")
    figure.add_subplot().plot(numpy.arange(10))
    for kind in ("png", "svg"):
        figure.savefig(io.BytesIO(), format=kind)
"""


def main() -> None:
    """Measure, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=100)
    options.add_argument("--rounds", type=int, default=300)
    options.add_argument("--data", type=Path)
    options.add_argument("--out", type=Path)
    asked = options.parse_args()
    lines = [HEAD, "|---" * 8 + "|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [train(folder / name, small(name, asked.rounds)) for name in ALGORITHMS]
        lines.append(measured(f"1 of {asked.rounds} rounds, 20 clients", models[:1], folder))
        many = [linked(models[i % len(models)], folder / "many" / f"{i:03d}") for i in range(asked.runs)]
        lines.append(measured(f"{asked.runs} of {asked.rounds} rounds, 20 clients", many, folder))
        if asked.data:
            for title, raw in large(asked.data).items():
                lines.append(measured(title, [train(folder / "large", raw)], folder))
                shutil.rmtree(folder / "large")
    text = "\n".join(lines)
    print(text)
    if asked.out:
        asked.out.write_text(f"# Time and memory of `report`\n\n{text}\n")


def small(name: str, rounds: int) -> dict[str, object]:
    """Return the configuration of a run on digits."""
    return {
        "data": {"name": "digits"},
        "partition": {"name": "exdir", "clients": 20, "classes_per_client": 2, "alpha": 0.5},
        "model": {"name": "mlp", "hidden": 64},
        "algorithm": {"name": name},
        "training": {"rounds": rounds, "participation": 0.4, "epochs": 1, "batch_size": 20, "lr": 0.05},
        "checkpoint": {"keep": 0},
    }


def large(data: Path) -> dict[str, dict[str, object]]:
    """Return configurations of large runs by title."""
    common = {"algorithm": {"name": "local"}, "checkpoint": {"keep": 0}}
    training = {"rounds": 3, "participation": 1.0, "epochs": 1, "batch_size": 50, "lr": 0.05}
    section = {"name": "cifar10", "root": str(data)}
    return {
        "1 of 3 rounds, 20 whole ResNet-18": {
            **common,
            "data": {**section, "limit": 1000},
            "partition": {"name": "dirichlet", "clients": 20, "beta": 10.0},
            "model": {"name": "resnet18"},
            "training": training,
        },
        "1 of 3 rounds, 500 whole cnn": {
            **common,
            "data": {**section, "limit": 10000},
            "partition": {"name": "dirichlet", "clients": 500, "beta": 10.0},
            "model": {"name": "cnn"},
            "training": training,
        },
    }


def train(folder: Path, raw: dict[str, object]) -> Path:
    """Run a configuration; return the folder of the run."""
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump({"seed": 0, **raw}))
    subprocess.run([PFLMPI, "run", config, "--out", folder, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return folder


def linked(run: Path, folder: Path) -> Path:
    """Return a copy of a run whose files are links to the same content."""
    shutil.copytree(run, folder, copy_function=os.link)
    return folder


def measured(title: str, runs: list[Path], folder: Path) -> str:
    """Report on some runs; return a line of the table."""
    out = folder / "report"
    shutil.rmtree(out, ignore_errors=True)
    seconds, memory = timed([str(PFLMPI), "report", *map(str, runs), "--out", str(out)])
    figures = len(list(out.rglob("*.svg")))
    floor, _ = timed([sys.executable, "-c", FLOOR, str(figures)])
    disk = sum(file.stat().st_size for run in runs for file in run.rglob("*") if file.is_file())
    page = (out / "report.html").stat().st_size
    numbers = (disk / 1e6, figures, seconds, floor, seconds / floor, memory / 1e6, page / 1e6)
    texts = ("{:.0f}", "{:d}", "{:.1f}", "{:.1f}", "{:.2f}", "{:.0f}", "{:.1f}")
    return f"| {title} | " + " | ".join(text.format(value) for text, value in zip(texts, numbers, strict=True)) + " |"


def timed(command: list[str]) -> tuple[float, float]:
    """Return the seconds that a command took and the most memory that it had, in bytes."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return time.monotonic() - start, usage.ru_maxrss * 1024.0


if __name__ == "__main__":
    main()
