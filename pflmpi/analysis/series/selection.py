"""Which runs, rounds and clients a figure takes, and how runs are called in it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pflmpi.analysis.run import Round, Run

MOST_STYLES = 12  # runs with a legend entry of their own; more are told apart by algorithm
MOST_ROUNDS = 40  # checkpoints that a figure over rounds reads


@dataclass(frozen=True, eq=False)
class Shown:
    """A run in a report.

    Attributes:
        run: the run.
        label: its name, unlike that of any other.
        legend: what its curves are called.
        style: number of their colour and line.
    """

    run: Run
    label: str
    legend: str
    style: int


def shown(runs: Sequence[Run]) -> list[Shown]:
    """Return the runs with names: the algorithm, and where several have one, also what differs in their paths.

    Up to twelve have a legend entry each; more share that of their algorithm.
    """
    labels = _labels(runs)
    if len(runs) <= MOST_STYLES:
        return [Shown(run, label, label, style) for style, (run, label) in enumerate(zip(runs, labels, strict=True))]
    groups = list(dict.fromkeys(run.name for run in runs))
    return [Shown(run, label, run.name, groups.index(run.name)) for run, label in zip(runs, labels, strict=True)]


def _labels(runs: Sequence[Run]) -> list[str]:
    counts = Counter(run.name for run in runs)
    paths = [run.path.absolute().parts for run in runs]
    head = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), 0)
    named = [
        run.name if counts[run.name] == 1 else f"{run.name} {'/'.join(parts[head:]) or parts[-1]}"
        for run, parts in zip(runs, paths, strict=True)
    ]
    again = Counter(named)  # the same folder twice, or one inside the other
    return [name if again[name] == 1 else f"{name} ({i})" for i, name in enumerate(named, 1)]


def spread_over(rounds: Sequence[int], most: int = MOST_ROUNDS) -> list[int]:
    """Return at most so many of the ascending rounds, evenly, with the first and the last.

    >>> spread_over([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[i] for i in np.linspace(0, len(rounds) - 1, most).round().astype(int)]


def client_leaf(state: Round, leaf: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the ids [m] and the rows [m, ...] of a leaf that clients keep, over all cohorts; None if none does."""
    found = [
        (rows.clients, np.asarray(rows))
        for path, rows in state.clients.items()
        if path == leaf or (len(state.cohorts) > 1 and path.partition("/")[2] == leaf)
    ]
    if not found:
        return None
    clients = np.concatenate([ids for ids, _ in found])
    order = np.argsort(clients, kind="stable")
    return clients[order], np.concatenate([rows for _, rows in found])[order]


def parameter(run: Run, name: str, default: float | str | bool | None) -> float | str | bool | None:
    """Return a hyperparameter of a run's algorithm; the default for a run that was written before there was one."""
    section = run.config.get("algorithm", {})
    value: float | str | bool | None = section.get(name, default)
    return value
