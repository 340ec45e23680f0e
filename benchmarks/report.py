"""Reports over runs: seconds of processor time, of the clock, memory, size of the page.

    python benchmarks/report.py [--runs 100] [--rounds 300] [--against CHECKOUT]

Six algorithms are run for so many rounds with all checkpoints kept; links to these make the many. With --against, each
report is also made by another checkout of pflmpi, in turn with this one, three times each: the median of its processor
time stands beside.
Goals: 6 runs within 6 s of processor time and a page below 2 MB; 100 runs of 300 rounds in less than a minute.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ("fedgmh", "pfedafe", "fedproto", "local", "fedper", "fesem")
PFLMPI = [sys.executable, "-m", "pflmpi"]
REPEATS = 3
HEAD = "| runs | on disk, MB | figures | processor, s | {} by the clock, s | peak memory, MB | page, MB |"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    checkouts = [ROOT, *([options.against.resolve()] if options.against else [])]
    lines = [HEAD.format("before, s |" * bool(options.against)), "|---" * (len(checkouts) + 6) + "|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [train(folder / name, small(name, options.rounds)) for name in ALGORITHMS]
        for count in (1, len(models)):
            lines.append(measured(f"{count} of {options.rounds} rounds, 20 clients", models[:count], folder, checkouts))
        many = [linked(models[i % len(models)], folder / "many" / f"{i:03d}") for i in range(options.runs)]
        lines.append(measured(f"{options.runs} of {options.rounds} rounds, 20 clients", many, folder, checkouts))
    print("\n".join(lines))


def small(name: str, rounds: int) -> dict[str, object]:
    """Configuration of a run on digits."""
    return {
        "data": {"name": "digits"},
        "partition": {"name": "exdir", "clients": 20, "classes_per_client": 2, "alpha": 0.5},
        "model": {"name": "mlp", "hidden": 64},
        "algorithm": {"name": name},
        "training": {"rounds": rounds, "participation": 0.4, "epochs": 1, "batch_size": 20, "lr": 0.05},
        "checkpoint": {"keep": 0},
    }


def train(folder: Path, raw: dict[str, object]) -> Path:
    """Run a configuration; return the folder of the run."""
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump({"seed": 0, **raw}))
    subprocess.run([*PFLMPI, "run", config, "--out", folder, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return folder


def linked(run: Path, folder: Path) -> Path:
    """A copy of a run whose files are links to the same content."""
    shutil.copytree(run, folder, copy_function=os.link)
    return folder


def measured(title: str, runs: list[Path], folder: Path, checkouts: list[Path]) -> str:
    """Report on some runs, by the checkouts in turn; return a line of the table."""
    seconds: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
    clock, peaks = [], []
    for _ in range(REPEATS):
        for checkout in reversed(checkouts):  # this one last: its page is looked at below
            out = folder / "report"
            shutil.rmtree(out, ignore_errors=True)
            processor, elapsed, memory = timed([*PFLMPI, "report", *map(str, runs), "--out", str(out)], checkout)
            seconds[checkout].append(processor)
            if checkout == ROOT:
                clock.append(elapsed)
                peaks.append(memory)
    figures = len(list(out.rglob("*.svg")))
    disk = sum(file.stat().st_size for run in runs for file in run.rglob("*") if file.is_file())
    page = (out / "report.html").stat().st_size
    medians = [statistics.median(each) for each in seconds.values()]
    numbers = [f"{disk / 1e6:.0f}", str(figures), *(f"{each:.1f}" for each in medians)]
    numbers += [f"{statistics.median(clock):.1f}", f"{max(peaks) / 1e6:.0f}", f"{page / 1e6:.1f}"]
    return f"| {title} | {' | '.join(numbers)} |"


def timed(command: list[str], checkout: Path) -> tuple[float, float, float]:
    """Seconds of processor time and of the clock that a command took, and the most memory that it had, in bytes."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_utime + usage.ru_stime, time.monotonic() - start, usage.ru_maxrss * 1024.0


if __name__ == "__main__":
    main()
