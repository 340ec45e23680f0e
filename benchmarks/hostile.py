"""Runs that are damaged, killed, stopped, starved and misled: nothing may be lost, wrong, or hang.

    python benchmarks/hostile.py --out FILE.md                      # all sections, as often as in SECTIONS
    python benchmarks/hostile.py --only flips --only kills --out FILE.md --again
    python benchmarks/hostile.py --only kills --first 37 --count 1  # one attempt, with what it printed

Each attempt has a seed of its own: `--seed`, the section and its number. Finished ones are noted in FILE.jsonl; started
again, the command goes on from there. `full` mounts a small disk, as root. Seconds are on this machine with whatever
else it does; nothing else depends on it.
"""

import argparse
import os
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from reliability import ledger
from reliability.bad_files import BadFiles
from reliability.bad_values import BadValues
from reliability.deaths import Deaths
from reliability.files import Files
from reliability.full_disk import FullDisk
from reliability.interruptions import Interruptions
from reliability.trials import Attempt, folder, warm_up


@dataclass(frozen=True)
class Section:
    """Attempts of one kind.

    Attributes:
        count: how many.
        make: what one attempt does, given a folder for what all of them need.
        after: what their seconds are; "" if they have none.
    """

    count: int
    make: Callable[[Path], Attempt]
    after: str = ""


_ENDED, _WENT_ON = "all processes ended", "the run went on"
SECTIONS = {
    "flips": Section(1000, lambda place: Files(place).flip),
    "exchanges": Section(100, lambda place: Files(place).exchange),
    "full": Section(50, lambda place: FullDisk(place).fill),
    "values": Section(5000, lambda place: BadValues(place).attempt),
    "files": Section(300, lambda place: BadFiles(place).attempt),
    "kills": Section(200, lambda place: Interruptions(place).kill, _ENDED),
    "stops": Section(200, lambda place: Interruptions(place).stop, _ENDED),
    "restarts": Section(20, lambda place: Deaths(place).restarted, _WENT_ON),
}


def main() -> int:
    """Print the table; 1 if anything was lost, wrong, or hung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--first", type=int, default=0, metavar="N")
    parser.add_argument("--count", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no attempt after them")
    parser.add_argument("--again", action="store_true", help="try what went badly once more")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="the table")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    warm_up()
    noted = ledger.Ledger(options.out and options.out.with_suffix(".jsonl"), options.seed)
    for name in options.only or SECTIONS:
        numbers = range(options.first, options.first + (options.count or SECTIONS[name].count))
        left = [number for number in numbers if _is_due(noted.find(name, number), options.again)]
        if left and time.monotonic() < end:
            _try(name, left, noted, end, shown=len(numbers) == 1)
    tried = {name: entries for name in SECTIONS if (entries := noted.entries(name))}
    details = [line for name, entries in tried.items() if SECTIONS[name].after
               for line in ledger.times(name, entries, SECTIONS[name].after)]  # fmt: skip
    text = "\n".join([ledger.table(tried), "", *details])
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return int(any(not entry.good for entries in tried.values() for entry in entries))


def _is_due(entry: ledger.Entry | None, again: bool) -> bool:
    return entry is None or (again and not entry.good)


def _try(name: str, numbers: list[int], noted: ledger.Ledger, end: float, shown: bool) -> None:
    """Make the attempts of a section that have these numbers."""
    with folder() as place:
        attempt = SECTIONS[name].make(place)
        for number in numbers:
            if time.monotonic() > end:
                return
            with folder() as own:
                trial = attempt(number, random.Random(f"{noted.seed} {name} {number}"), own)
            entry = noted.add(name, number, trial)
            print(f"{name} {number}: {trial.what}: {', '.join(entry.labels)}", file=sys.stderr, flush=True)
            if shown or not entry.good:
                print(re.sub(r"(?m)^", "    ", trial.text), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
