"""The partition: samples of each client and class, and clients in the order of their classes."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pflmpi.analysis.plots import Matrices, Missing, Panel, Plot
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun
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
            "`pflmpi data CONFIG` draws it from the configuration",
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


def by_class(plot: Plot | Missing, run: Run) -> Plot | Missing:
    """A figure of every two clients with the clients in the order of the class that they have most samples of.

    Other figures, and those of a run without a readable partition, are as they were.
    """
    if not isinstance(plot, Matrices) or plot.row_label != plot.column_label:
        return plot
    if (counts := counts_of(run)) is None:
        return plot
    main = counts.train.argmax(1)
    panels = tuple(_ordered(panel, main) for panel in plot.panels)
    return replace(plot, panels=panels, caption=f"{plot.caption} Clients with the same main class are side by side.")


def without_single_class(plot: Plot | Missing, run: Run) -> Plot | Missing:
    """The overlap of what clients choose without those of a single class, whose choice says nothing."""
    if not isinstance(plot, Matrices) or not plot.choices or (counts := counts_of(run)) is None:
        return plot
    single = np.flatnonzero((counts.train > 0).sum(1) == 1).tolist()
    shown = [place for place, client in enumerate(plot.panels[0].rows) if client not in single]
    left_out = [str(client) for client in plot.panels[0].rows if client in single]
    if not left_out or len(shown) < 2:
        return plot
    (panel,) = plot.panels
    names = [panel.rows[place] for place in shown]
    why = "with nothing to tell apart, their entries hardly change, and ties decide"
    caption = f"{plot.caption} Clients of a single class are left out ({', '.join(left_out)}): {why}."
    return replace(
        plot, panels=(Panel(panel.title, panel.values[np.ix_(shown, shown)], names, names),), caption=caption
    )


def _ordered(panel: Panel, main: np.ndarray) -> Panel:
    clients = np.array(panel.rows)
    order = np.lexsort((clients, main[clients]))
    names = clients[order].tolist()
    return Panel(panel.title, panel.values[np.ix_(order, order)], names, names)
