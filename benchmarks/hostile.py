"""Runs that are damaged, killed, stopped and starved: nothing may be lost, wrong, or hang.

    python benchmarks/hostile.py                                    # all sections, as often as in COUNTS
    python benchmarks/hostile.py --only flips --count 1000 --out FILE
    python benchmarks/hostile.py --only kills --first 37 --count 1  # one attempt again, with what it printed

Every attempt has a seed of its own: `--seed`, the section and its number. `full` mounts a small disk, as root.
"""

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hostile_files
import hostile_processes
from trials import LABELS, Section, Trial, folder

COUNTS = {"flips": 1000, "exchanges": 100, "kills": 200, "stops": 200, "full": 50}
# A damaged run may be refused; one that was only interrupted must go on.
GOOD = {name: {"found", "continued", "refused"} if name in ("flips", "exchanges") else {"continued"} for name in COUNTS}


def section(name: str, place: Path) -> Section:
    """What one attempt of a section does."""
    if name in ("flips", "exchanges"):
        files = hostile_files.Files(place)
        return files.flip if name == "flips" else files.exchange
    running = hostile_processes.Processes(place)
    attempts: dict[str, Section] = {"kills": running.kill, "stops": running.stop, "full": running.full}
    return attempts[name]


def main() -> int:
    """Print the table; 1 if anything was lost, wrong, or hung."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", choices=[*COUNTS, "input"], action="append")
    options.add_argument("--count", type=int, metavar="N")
    options.add_argument("--first", type=int, default=0, metavar="N")
    options.add_argument("--seed", type=int, default=0, metavar="N")
    options.add_argument("--out", type=Path, metavar="FILE", help="the table, appended")
    asked = options.parse_args()
    import pflmpi.experiment.start  # noqa: F401  # before the forks

    lines = [f"| | tried | {' | '.join(LABELS)} |", f"|---|---|{'---|' * len(LABELS)}"]
    details: list[str] = []
    bad = 0
    for name in asked.only or [*COUNTS, "input"]:
        if name == "input":  # bad values and bad files, which has a table of its own
            words = [sys.executable, str(Path(__file__).with_name("hostile_input.py")), "--seed", str(asked.seed)]
            bad += subprocess.run(words, check=False).returncode
            continue
        with folder() as place:
            attempt = section(name, place)
            numbers = range(asked.first, asked.first + (asked.count or COUNTS[name]))
            trials = [_one(name, number, attempt, asked.seed, len(numbers) == 1) for number in numbers]
        counts = Counter(label for trial in trials for label in trial.labels)
        lines.append(f"| {name} | {len(trials)} | {' | '.join(str(counts[label]) for label in LABELS)} |")
        details += _by_way(name, trials)
        bad += sum(not trial.labels <= GOOD[name] for trial in trials)
    text = "\n".join([*lines, "", *details])
    print(text)
    if asked.out:
        with asked.out.open("a") as file:
            file.write(text + "\n")
    return int(bad > 0)


def _by_way(name: str, trials: list[Trial]) -> list[str]:
    """For each kind of blow, how many, how many were good, and median and worst seconds until all processes ended."""
    lines = []
    for way in sorted({trial.what.partition(",")[0] for trial in trials if trial.seconds is not None}):
        of = [trial for trial in trials if trial.what.partition(",")[0] == way]
        seconds = [trial.seconds for trial in of if trial.seconds is not None]
        good = sum(trial.labels <= GOOD[name] for trial in of)
        after = f"{statistics.median(seconds):.1f} s (at most {max(seconds):.1f})"
        lines.append(f"- {name}, {way}: {good} of {len(of)} good, all processes ended after {after}")
    return lines


def _one(name: str, number: int, attempt: Section, seed: int, shown: bool) -> Trial:
    with folder() as place:
        trial = attempt(random.Random(f"{seed} {name} {number}"), place)
    good = trial.labels <= GOOD[name]
    print(f"{name} {number}: {trial.what}: {', '.join(sorted(trial.labels))}", file=sys.stderr, flush=True)
    if shown or not good:
        print(re.sub(r"(?m)^", "    ", trial.text), file=sys.stderr, flush=True)
    return trial


if __name__ == "__main__":
    sys.exit(main())
