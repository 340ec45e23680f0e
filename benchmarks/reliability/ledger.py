"""The finished attempts of `hostile.py`: a line of JSON each in a file, from which it goes on, and their tables."""

import json
import statistics
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reliability.trials import Trial

BAD = ("missed", "wrong bits", "hang", "traceback", "internal error", "other")
_TEXT = 4000  # characters kept of what a bad attempt printed


@dataclass(frozen=True)
class Entry:
    """An attempt that has ended; see `Trial`."""

    section: str
    number: int
    seed: int
    commit: str
    what: str
    labels: Sequence[str]
    seconds: float | None = None
    text: str = field(default="", repr=False)

    @property
    def good(self) -> bool:
        """Whether nothing was lost, wrong, or hung."""
        return bool(self.labels) and not set(self.labels) & set(BAD)

    @property
    def blow(self) -> str:
        """The kind of what was done."""
        return self.what.partition(",")[0]


class Ledger:
    """The attempts of one seed.

    Args:
        path: of the file; None keeps them in memory.
    """

    def __init__(self, path: Path | None, seed: int) -> None:
        self.seed = seed
        self._path, self._commit = path, _commit()
        self._entries: dict[tuple[str, int], Entry] = {}
        for line in path.read_text().splitlines() if path and path.exists() else ():
            entry = Entry(**json.loads(line))
            if entry.seed == seed:
                self._entries[entry.section, entry.number] = entry

    def find(self, section: str, number: int) -> Entry | None:
        """The last time that this was tried."""
        return self._entries.get((section, number))

    def add(self, section: str, number: int, trial: Trial) -> Entry:
        """Note an attempt."""
        entry = Entry(section, number, self.seed, self._commit, trial.what, sorted(trial.labels), trial.seconds)
        if not entry.good:
            entry = Entry(**vars(entry) | {"text": trial.text[-_TEXT:]})
        self._entries[section, number] = entry
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(vars(entry)) + "\n")
        return entry

    def entries(self, section: str) -> list[Entry]:
        """The attempts of a section, in their order."""
        return [entry for (name, _), entry in sorted(self._entries.items()) if name == section]


def table(sections: Mapping[str, Sequence[Entry]]) -> str:
    """How often each section was tried and what came of it, with the commits that were tried."""
    lines = [
        f"| | tried | well | {' | '.join(BAD)} | of those that went well |",
        f"|---|---|---|{'---|' * len(BAD)}---|",
    ]
    for name, entries in sections.items():
        well = Counter(" and ".join(entry.labels) for entry in entries if entry.good)
        bad = Counter(label for entry in entries for label in entry.labels)
        counts = [len(entries), well.total(), *(bad[label] for label in BAD)]
        kinds = ", ".join(f"{count} {label}" for label, count in well.most_common())
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {kinds} |")
    commits = Counter(entry.commit for entries in sections.values() for entry in entries)
    return "\n".join([*lines, "", "Commits: " + ", ".join(f"{name} ({count})" for name, count in commits.items())])


def times(name: str, entries: Sequence[Entry], after: str) -> list[str]:
    """For each kind of blow how many, how many went well, and median and worst seconds."""
    lines = []
    for blow in sorted({entry.blow for entry in entries}):
        of = [entry for entry in entries if entry.blow == blow]
        seconds = [entry.seconds for entry in of if entry.seconds is not None]
        spread = f"; {after} after {statistics.median(seconds):.1f} s (at most {max(seconds):.1f})" if seconds else ""
        lines.append(f"- {name}, {blow}: {sum(entry.good for entry in of)} of {len(of)} well{spread}")
    return lines


def _commit() -> str:
    """Of the code that is tried; "+" if it was changed since."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
