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

MOST_STYLES = 12  # runs with a legend entry of their own; if there are more, those of an algorithm share one
MOST_ROUNDS = 20  # checkpoints that a figure over rounds reads
MOST_CLIENTS = 100  # clients in figures of pairs of clients, and in the menu of a page

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class NamedRun:
    """A run in a report."""

    run: Run
    label: str  # a unique name
    legend: str  # the name of its curves in the legend
    style: int  # index of the colour and line style of its curves
    first: int = 0  # the round where its curves begin: for a fork shown with its parent, the last round that both have


def name_runs(runs: Sequence[Run]) -> list[NamedRun]:
    """Labels runs by their algorithm, and runs with the same algorithm also by the part of their paths that differs.

    Up to `MOST_STYLES` runs have a legend entry each; if there are more, those of an algorithm share one.
    """
    labels = _make_labels([run.name for run in runs], [run.path for run in runs])
    algorithms = list(dict.fromkeys(run.name for run in runs))
    named_runs = []
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        others = runs if run.forked_from else ()
        first = max((run.shared_rounds(other) for other in others), default=0)
        legend, style = (label, number) if len(runs) <= MOST_STYLES else (run.name, algorithms.index(run.name))
        named_runs.append(NamedRun(run, label, legend, style, first))
    return named_runs


def pick_evenly_spaced(items: Sequence[T] | np.ndarray, most: int = MOST_ROUNDS) -> list[T]:
    """At most `most` of the items, evenly spaced, including the first and the last.

    >>> pick_evenly_spaced([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(items) <= most:
        return list(items)
    return [items[index] for index in np.linspace(0, len(items) - 1, most).round().astype(int)]


def choose_clients(checkpoint: Checkpoint, most: int = MOST_CLIENTS) -> np.ndarray:
    """Ascending ids of at most `most` clients of each cohort, evenly spaced.

    In a cohort of more than `MOST_CLIENTS` clients they are chosen among those that have trained.
    """
    chosen: list[int] = []
    for members in checkpoint.cohorts.values():
        candidates = members
        if len(members) > MOST_CLIENTS and checkpoint.trained[members].sum() > 1:
            candidates = members[checkpoint.trained[members]]
        chosen += pick_evenly_spaced(pick_evenly_spaced(candidates, MOST_CLIENTS), most)
    return np.sort(chosen)


def describe_chosen_clients(checkpoint: Checkpoint, clients: np.ndarray) -> str:
    """A sentence for captions on how `choose_clients` chose these clients; "" if they are all."""
    if len(clients) == checkpoint.num_clients:
        return ""
    among = " among those that have trained" if checkpoint.trained[clients].all() else ""
    return f"{len(clients)} of {checkpoint.num_clients} clients, evenly spaced{among}."


def pick_first_middle_last(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The first, the middle and the last of the checkpoints; round 0 only if there is no other."""
    return pick_evenly_spaced([checkpoint for checkpoint in checkpoints if checkpoint.number > 0] or checkpoints, 3)


@dataclass(frozen=True, eq=False)
class SeedGroup:
    """One or more runs that differ only in the seed."""

    runs: tuple[NamedRun, ...]
    label: str  # a unique name, without the number of seeds

    @property
    def title(self) -> str:
        """The label, with the number of seeds if there are several."""
        return f"{self.label}, {len(self.runs)} seeds" if len(self.runs) > 1 else self.label

    @property
    def folder(self) -> Path:
        """The deepest folder that contains all its runs."""
        return Path(os.path.commonpath([named_run.run.path.absolute() for named_run in self.runs]))


def label_groups(groups: Sequence[Sequence[NamedRun]]) -> list[SeedGroup]:
    """Labels groups like runs, by the folder of a group if it contains no other run, else by that of its first run."""
    unlabelled = [SeedGroup(tuple(group), "") for group in groups]
    paths = []
    for group in unlabelled:
        others = (named_run.run.path for other in unlabelled if other is not group for named_run in other.runs)
        shared = any(path.absolute().is_relative_to(group.folder) for path in others)
        paths.append(group.runs[0].run.path if shared or len(group.runs) == 1 else group.folder)
    labels = _make_labels([group.runs[0].run.name for group in unlabelled], paths)
    return [replace(group, label=label) for group, label in zip(unlabelled, labels, strict=True)]


def _make_labels(algorithms: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Labels each folder by its algorithm; if several have the same, also by its path below their common folder."""
    counts = Counter(algorithms)
    paths = [folder.absolute().parts for folder in folders]
    depth = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), 0)
    labels = [
        name if counts[name] == 1 else f"{name} {'/'.join(parts[depth:]) or parts[-1]}"
        for name, parts in zip(algorithms, paths, strict=True)
    ]
    label_counts = Counter(labels)  # the same folder twice, or one inside the other
    return [label if label_counts[label] == 1 else f"{label} ({i})" for i, label in enumerate(labels, 1)]
