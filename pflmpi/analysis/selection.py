"""Which runs and rounds a figure shows, and how runs are named in it."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.run import Run

MOST_STYLES = 12  # runs with a legend entry of their own; more share that of their algorithm
MOST_ROUNDS = 20  # checkpoints that a figure over rounds reads
MOST_CLIENTS = 100  # of figures of every two clients, and of those that a reader can choose

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class NamedRun:
    """A run in a report.

    Attributes:
        label: its name, unlike that of any other.
        legend: the name of its curves.
        style: number of their colour and line.
        first: the round that its curves begin with: of a fork whose parent is shown too, the one after which it left.
    """

    run: Run
    label: str
    legend: str
    style: int
    first: int = 0


def named(runs: Sequence[Run]) -> list[NamedRun]:
    """The runs with names: the algorithm, and where several have one, also what differs in their paths.

    Up to twelve have a legend entry each; more share that of their algorithm.
    """
    labels = _make_labels([run.name for run in runs], [run.path for run in runs])
    groups = list(dict.fromkeys(run.name for run in runs))
    named_runs = []
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        others = runs if run.forked_from else ()
        first = max((run.shared_rounds(other) for other in others), default=0)
        legend, style = (label, number) if len(runs) <= MOST_STYLES else (run.name, groups.index(run.name))
        named_runs.append(NamedRun(run, label, legend, style, first))
    return named_runs


def spread_over(items: Sequence[T] | np.ndarray, most: int = MOST_ROUNDS) -> list[T]:
    """At most so many of the items, evenly spaced, with the first and the last.

    >>> spread_over([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(items) <= most:
        return list(items)
    return [items[place] for place in np.linspace(0, len(items) - 1, most).round().astype(int)]


def choose_clients(checkpoint: Checkpoint, most: int = MOST_CLIENTS) -> np.ndarray:
    """Ascending ids of at most so many clients of each cohort, evenly spaced; of many those that have trained."""
    chosen = []
    for members in checkpoint.cohorts.values():
        trained = members[checkpoint.trained[members]] if len(members) > MOST_CLIENTS else members
        chosen += spread_over(spread_over(trained if len(trained) > 1 else members, MOST_CLIENTS), most)
    return np.sort(chosen)


def describe_chosen_clients(checkpoint: Checkpoint, clients: np.ndarray) -> str:
    """A sentence that says how few of all clients `choose_clients` are; "" for all of them."""
    number, among = checkpoint.num_clients, " among those that have trained" * bool(checkpoint.trained[clients].all())
    return "" if len(clients) == number else f"{len(clients)} of {number} clients, evenly spaced{among}."


def pick_first_middle_last(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The first, the middle and the last of the checkpoints; not the one before the first round."""
    return spread_over([checkpoint for checkpoint in checkpoints if checkpoint.number > 0] or checkpoints, 3)


@dataclass(frozen=True, eq=False)
class SeedGroup:
    """Runs that differ in the seed alone, one or more, in their order.

    Attributes:
        label: its name, unlike that of any other group; without the number of its runs.
    """

    runs: tuple[NamedRun, ...]
    label: str

    @property
    def title(self) -> str:
        """The label, with the number of seeds where there are several."""
        return f"{self.label}, {len(self.runs)} seeds" if len(self.runs) > 1 else self.label

    @property
    def lengths(self) -> list[int]:
        """The numbers of rounds that its runs have, ascending, each once."""
        return sorted({len(named_run.run.columns["round"]) for named_run in self.runs})

    @property
    def common_rounds(self) -> str:
        """Up to which round its seeds can be averaged; "" where all have the same number of rounds."""
        return f"up to round {self.lengths[0]}, which all seeds have" if len(self.lengths) > 1 else ""

    @property
    def folder(self) -> Path:
        return Path(os.path.commonpath([named_run.run.path.absolute() for named_run in self.runs]))


def label_groups(groups: Sequence[Sequence[NamedRun]]) -> list[SeedGroup]:
    """The groups with labels: those of the folders that contain their runs and no others, else of their first runs."""
    unnamed = [SeedGroup(tuple(group), "") for group in groups]
    paths = []
    for group in unnamed:
        others = (named_run.run.path for other in unnamed if other is not group for named_run in other.runs)
        shared = any(path.absolute().is_relative_to(group.folder) for path in others)
        paths.append(group.runs[0].run.path if shared or len(group.runs) == 1 else group.folder)
    labels = _make_labels([group.runs[0].run.name for group in unnamed], paths)
    return [replace(group, label=label) for group, label in zip(unnamed, labels, strict=True)]


def _make_labels(algorithms: Sequence[str], folders: Sequence[Path]) -> list[str]:
    counts = Counter(algorithms)
    paths = [folder.absolute().parts for folder in folders]
    head = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), 0)
    names = [
        name if counts[name] == 1 else f"{name} {'/'.join(parts[head:]) or parts[-1]}"
        for name, parts in zip(algorithms, paths, strict=True)
    ]
    again = Counter(names)  # the same folder twice, or one inside the other
    return [name if again[name] == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]
