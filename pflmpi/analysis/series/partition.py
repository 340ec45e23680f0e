"""The partition: samples of each client and class."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pflmpi.analysis.plots import Matrices, Missing, Panel
from pflmpi.analysis.run import Run
from pflmpi.analysis.series.selection import NamedRun
from pflmpi.errors import CheckpointError
from pflmpi.store.partition_file import SampleCounts
from pflmpi.text import some

_TITLE = "The partition"


def counts_of(run: Run) -> SampleCounts | None:
    """Samples of each client and class; None where the run has not recorded them, or cannot be read."""
    try:
        return run.counts
    except CheckpointError:
        return None


def class_names(run: Run, count: int) -> list[str]:
    """What the classes are called in the newest checkpoint; their numbers where it does not say."""
    try:
        found = json.loads(str(run.round(run.rounds[-1]).attributes.get("class_names", "[]"))) if run.rounds else []
    except (CheckpointError, ValueError):
        found = []
    return [str(name) for name in found] if len(found) == count else [str(label) for label in range(count)]


def partitions(runs: Sequence[NamedRun], most: int) -> list[Matrices | Missing]:
    """The partition of each run, once for those that have the same samples of each class on each client.

    Args:
        most: how many of them; titles name the runs wherever there are more.
    """
    groups: dict[tuple[object, ...], list[NamedRun]] = {}
    for one in runs:
        held = counts_of(one.run)
        key = (held.train.shape, held.train.tobytes(), held.test.tobytes()) if held else ()
        groups.setdefault(key, []).append(one)
    shown = list(groups.values())[:most]
    figures = [partition(group[0].run) for group in shown]
    if len(groups) == 1:
        return figures
    ends = ["", *(f"_{number}" for number in range(2, len(shown) + 1))]
    titles = [f"{_TITLE} of {some([one.label for one in group])}" for group in shown]
    return [
        replace(one, title=title) if isinstance(one, Missing) else replace(one, title=title, name=one.name + end)
        for one, title, end in zip(figures, titles, ends, strict=True)
    ]


def partition(run: Run) -> Matrices | Missing:
    """Training and test samples of each client (rows) and class (columns)."""
    try:
        counts = run.counts
    except CheckpointError as error:
        return Missing(_TITLE, str(error))
    if counts is None:
        return Missing(
            _TITLE,
            f"{run.path} has no partition.csv: it was written before runs had one; "
            "`pflmpi partition` draws it from the configuration",
        )
    clients, classes = counts.train.shape
    names = class_names(run, classes)
    parts = {"training samples": counts.train, "test samples": counts.test}
    return Matrices(
        name="partition",
        title=_TITLE,
        caption=f"Samples of each of the {clients} clients and {classes} classes; an empty cell: none.",
        row_label="client",
        column_label="class",
        value_label="samples",
        panels=tuple(
            Panel(name, np.where(held > 0, held, np.nan).astype(np.float64), range(clients), names)
            for name, held in parts.items()
        ),
    )
