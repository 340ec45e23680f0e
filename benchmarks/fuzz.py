"""Fuzzing of the readers of YAML, idx, npz, JSON and HDF5 for as long as options, by the tests that fuzz in the suite.

    python benchmarks/fuzz.py --seconds 3600 [--seed 0] [--out FILE]

The tests run again and again, each time with new examples, until the time is over; each pass has the seed after that
of the pass before. With --out, counts are added to those that the file has, and the seeds go on from there.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMES = 40  # as many examples in a pass as in the suite
_TEST = re.compile(r"^(?:\S+/)?(test_fuzz_\w+)\.py::(\w+):$")
_COUNT = re.compile(r"(\d+) passing, (\d+) failing")


def main() -> int:
    """Fuzz, and print how many examples each test has had; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first pass")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the counts, as JSON")
    options = parser.parse_args()
    done = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    passing, failing = Counter(done.get("passing", {})), Counter(done.get("failing", {}))
    seed, seconds = done.get("next seed", options.seed), done.get("seconds", 0.0)
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        began = time.monotonic()
        text = _tests(seed)
        if failed := _count(text, passing, failing):
            print(f"seed {seed}: {', '.join(failed)}\n{text}", file=sys.stderr, flush=True)
        seed, seconds = seed + 1, seconds + time.monotonic() - began
        if options.out:
            done = {"passing": passing, "failing": failing, "next seed": seed, "seconds": round(seconds)}
            options.out.write_text(json.dumps(done, indent=1) + "\n")
    print("| test | examples | failed |\n|---|---|---|")
    for name in sorted(passing | failing):
        print(f"| {name} | {passing[name] + failing[name]} | {failing[name]} |")
    print(f"| all | {(passing + failing).total()} | {failing.total()} |\n\n{seconds / 60:.0f} min, seeds to {seed - 1}")
    return int(failing.total() > 0)


def _tests(seed: int) -> str:
    """What one pass of all tests that fuzz prints."""
    files = [str(path) for path in sorted(ROOT.glob("tests/*/test_fuzz_*.py"))]
    words = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout=0"]
    words += ["--hypothesis-show-statistics", f"--hypothesis-seed={seed}", *files]
    environment = {**os.environ, "PFLMPI_FUZZ_TIMES": str(TIMES)}
    done = subprocess.run(words, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the tests did not run:\n{done.stdout}{done.stderr}")
    return done.stdout


def _count(text: str, passing: Counter[str], failing: Counter[str]) -> list[str]:
    """Add the examples of a pass; returns the tests that failed."""
    name, failed = "", []
    for line in text.splitlines():
        if found := _TEST.match(line):
            name = f"{found[1]}: {found[2]}"
        elif found := _COUNT.search(line):
            passing[name] += int(found[1])
            failing[name] += int(found[2])
            failed += [name] if int(found[2]) else []
    return failed


if __name__ == "__main__":
    sys.exit(main())
