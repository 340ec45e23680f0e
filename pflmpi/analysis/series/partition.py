"""The partition: samples of each client and class."""

import json

import numpy as np

from pflmpi.analysis.plots import Matrices, Missing, Panel
from pflmpi.analysis.run import Run
from pflmpi.errors import CheckpointError
from pflmpi.store import partition_file
from pflmpi.store.partition_file import Counts

_TITLE = "The partition"


def counts_of(run: Run) -> Counts | None:
    """Samples of each client and class; None where the run has not recorded them, or cannot be read."""
    try:
        return partition_file.read(run.path)
    except CheckpointError:
        return None


def class_names(run: Run, count: int) -> list[str]:
    """What the classes are called in the newest checkpoint; their numbers where it does not say."""
    try:
        found = json.loads(str(run.round(run.rounds[-1]).attributes.get("class_names", "[]"))) if run.rounds else []
    except (CheckpointError, ValueError):
        found = []
    return [str(name) for name in found] if len(found) == count else [str(label) for label in range(count)]


def partition(run: Run) -> Matrices | Missing:
    """Training and test samples of each client (rows) and class (columns)."""
    try:
        counts = partition_file.read(run.path)
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
