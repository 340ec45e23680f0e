"""Which runs and rounds a figure shows, and how runs are named in it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.run import Run

MOST_STYLES = 12  # runs with a legend entry of their own; more share that of their algorithm
MOST_ROUNDS = 20  # checkpoints that a figure over rounds reads

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class NamedRun:
    """A run in a report.

    Attributes:
        run: the run.
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
    labels = _labels(runs)
    groups = list(dict.fromkeys(run.name for run in runs))
    named_runs = []
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        others = runs if run.forked_from else ()
        first = max((run.shared_rounds(other) for other in others), default=0)
        legend, style = (label, number) if len(runs) <= MOST_STYLES else (run.name, groups.index(run.name))
        named_runs.append(NamedRun(run, label, legend, style, first))
    return named_runs


def spread_over(items: Sequence[T], most: int = MOST_ROUNDS) -> list[T]:
    """At most so many of the items, evenly spaced, with the first and the last.

    >>> spread_over([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(items) <= most:
        return list(items)
    return [items[place] for place in np.linspace(0, len(items) - 1, most).round().astype(int)]


def first_middle_last(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The first, the middle and the last of the checkpoints; not the one before the first round."""
    return spread_over([checkpoint for checkpoint in checkpoints if checkpoint.number > 0] or checkpoints, 3)


def _labels(runs: Sequence[Run]) -> list[str]:
    counts = Counter(run.name for run in runs)
    paths = [run.path.absolute().parts for run in runs]
    head = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), 0)
    names = [
        run.name if counts[run.name] == 1 else f"{run.name} {'/'.join(parts[head:]) or parts[-1]}"
        for run, parts in zip(runs, paths, strict=True)
    ]
    again = Counter(names)  # the same folder twice, or one inside the other
    return [name if again[name] == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]
