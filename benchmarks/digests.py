"""Digests of every algorithm and variant, to show that a redesign changes no bit.

    python benchmarks/digests.py --write before.json     # before the change
    python benchmarks/digests.py --against before.json   # after it, on the same machine

Digits, 3 rounds, executors loop and lanes, 1 and 3 ranks (threads), with and without local batch-norm statistics.
Digests hold for one model of CPU and one version of PyTorch, so the file is not kept with the project.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

import quick_run
from every_algorithm import every_algorithm


def digests() -> dict[str, str]:
    """Computes the digest after the last round by "case executor", or a message if 1 and 3 ranks differ."""
    computed = {}
    for case, sections in every_algorithm().items():
        for executor in ("loop", "lanes"):
            raw = quick_run.settings(sections, runtime={"executor": executor, "lanes": 3})
            with tempfile.TemporaryDirectory() as folder:
                one, three = (quick_run.run(raw, Path(folder) / str(ranks), ranks) for ranks in (1, 3))
            computed[f"{case} {executor}"] = one if one == three else f"differs: {one} on 1 rank, {three} on 3"
            print(case, executor, computed[f"{case} {executor}"][:12], flush=True)
    return computed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE")
    options = parser.parse_args()
    now = digests()
    if options.write:
        options.write.write_text(json.dumps(now, indent=1) + "\n")
    if not options.against:
        return 0
    before = json.loads(options.against.read_text())
    changed = [case for case in before if now.get(case) != before[case]]
    print(f"{len(before) - len(changed)} of {len(before)} as before; new: {sorted(now.keys() - before.keys())}")
    for case in changed:
        print(f"  {case}: {before[case][:12]} before, {now.get(case, 'missing')[:12]} now")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
