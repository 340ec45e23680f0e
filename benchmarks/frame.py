"""Seconds to read 1,000 runs as one table: `python benchmarks/frame.py [RUNS] [ROUNDS]`."""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pflmpi
from pflmpi.config import yaml_file
from pflmpi.config.keywords import Config
from pflmpi.store import config_file, metrics_file


def main(runs: int = 1000, rounds: int = 100) -> None:
    """Write folders with the two files that a table reads, and print how long reading them takes."""
    settings = {"partition": {"name": "iid", "clients": 20}, "training": {"rounds": rounds}}
    config = Config(data="digits", algorithm="fedgmh", **settings).resolved()
    with TemporaryDirectory() as folder:
        for number in range(runs):
            run = Path(folder) / f"run-{number:05d}"
            (run / "shards").mkdir(parents=True)
            config_file.write(run, yaml_file.dump({**config, "seed": number, "recorded": {"data": "0" * 64}}))
            metrics_file.restart(run, 0)
            values = ["10" if metrics_file.is_count(name) else "0.123456" for name in metrics_file.COLUMNS[1:]]
            lines = (",".join([str(round), *values]) for round in range(1, rounds + 1))
            with open(metrics_file.path(run), "a") as file:
                file.writelines(f"{line}\n" for line in lines)
        start = time.perf_counter()
        opened = pflmpi.open_runs(f"{folder}/*")
        middle = time.perf_counter()
        frame = opened.frame()
        end = time.perf_counter()
    print(f"{len(opened)} runs, {len(frame)} lines: {end - start:.2f} s ({middle - start:.2f} s to open)")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
