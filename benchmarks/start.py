"""Processor time of the quickstart on one rank until its first round begins, beside that of `import torch`.

    python benchmarks/start.py [--passes 5]

Each is a new process, in turn. Ours counts the processes that it has started and that have ended, too.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NoReturn

FLOOR = "import time, torch; print(time.process_time())"
MOST = 3.0  # seconds: the goal


def main() -> None:
    """Measure both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--begin", metavar="FOLDER", help=argparse.SUPPRESS)  # what a pass of ours does
    options = parser.parse_args()
    if options.begin:
        begin(options.begin)
    measured: dict[str, list[float]] = {"import torch": [], "until the first round begins": []}
    for number in range(options.passes):
        with tempfile.TemporaryDirectory() as folder:
            for name, command in zip(
                measured, (["-c", FLOOR], [__file__, "--begin", f"{folder}/{number}"]), strict=True
            ):
                measured[name].append(seconds(command))
    print("| processor time, s | median | least | most |\n|---|---|---|---|")
    for name, times in measured.items():
        print(f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |")
    ours, floor = (statistics.median(measured[name]) for name in reversed(measured))
    print(f"\n{ours / floor:.2f} times `import torch`; goal: {MOST:.0f} s, {'kept' if ours <= MOST else 'missed'}.")


def seconds(command: Sequence[str]) -> float:
    """What a Python process prints as its last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def begin(folder: str) -> NoReturn:
    """Run the quickstart in this process until its first round begins; print the processor's seconds, and end."""
    from pflmpi.cli import main as command  # measured, so not before
    from pflmpi.runtime import rounds

    def first_round(*_: object) -> NoReturn:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        print(sum(one.ru_utime + one.ru_stime for one in used), flush=True)
        os._exit(0)

    rounds.train = first_round  # type: ignore[assignment]
    sys.exit(command(["run", "configs/quickstart.yaml", "--ranks", "1", "--out", folder, "--quiet"]))


if __name__ == "__main__":
    main()
