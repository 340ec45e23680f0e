"""The figure of the partition (samples of each client and class), and sorting clients by their main class."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pflmpi.analysis.plots import Matrices, Missing, Panel, Plot
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun
from pflmpi.errors import CheckpointError
from pflmpi.store.partition_file import SampleCounts
from pflmpi.text import join_truncated

_TITLE = "The partition"
_SIDES = ("training samples", "test samples", "validation samples")


def read_class_names(run: Run, count: int) -> list[str]:
    """The names of the classes in the newest checkpoint; their numbers if it has no such names."""
    try:
        names = run.round(run.rounds[-1]).class_names if run.rounds else []
    except (CheckpointError, ValueError):
        names = []
    return names if len(names) == count else [str(label) for label in range(count)]


def group_by_partition(runs: Sequence[NamedRun]) -> list[tuple[SampleCounts | None, list[NamedRun]]]:
    """Groups runs by their samples of each class on each client; these are None for runs that did not record them."""
    groups: dict[tuple[object, ...], tuple[SampleCounts | None, list[NamedRun]]] = {}
    for named_run in runs:
        counts = named_run.run.counts
        key = (counts.train.shape, *(side.tobytes() for side in counts.sides.values())) if counts else ()
        groups.setdefault(key, (counts, []))[1].append(named_run)
    return list(groups.values())


def plot_partitions(runs: Sequence[NamedRun], most: int) -> list[Matrices | Missing]:
    """The distinct partitions of the runs; titles name the runs if there are several partitions.

    Args:
        most: how many are drawn.
    """
    groups = group_by_partition(runs)
    if len(groups) == 1:
        return [plot_partition(groups[0][1][0].run)]
    plots: list[Matrices | Missing] = []
    for number, (_, owners) in enumerate(groups, 1):
        title = f"{_TITLE} of {join_truncated([named_run.label for named_run in owners])}"
        if number > most:
            plots.append(Missing(title, f"{most} partitions are shown"))
            continue
        plot = plot_partition(owners[0].run)
        plots.append(replace(plot, title=title))
    return plots


def plot_partition(run: Run) -> Matrices | Missing:
    """Training, test and validation samples of each client (rows) and class (columns)."""
    if (counts := run.counts) is None:
        return Missing(_TITLE, f"{run.path} has no partition.csv; `pflmpi data CONFIG` draws it from the configuration")
    clients, classes = counts.train.shape
    names = read_class_names(run, classes)
    return Matrices(
        name="partition",
        title=_TITLE,
        caption=f"Samples of each of the {clients} clients and {classes} classes; an empty cell: none.",
        row_label="client",
        column_label="class",
        value_label="samples",
        panels=tuple(
            Panel(name, np.where(samples > 0, samples, np.nan).astype(np.float64), range(clients), names)
            for name, samples in zip(_SIDES, counts.sides.values(), strict=False)
        ),
    )


def sort_by_class(plot: Plot | Missing, run: Run) -> Plot | Missing:
    """Sorts the clients of a figure of pairs of clients by their main class.

    Other figures, and those of a run without a recorded partition, are returned unchanged. In a figure of choices,
    clients with a single class are left out: they have nothing to tell apart, so ties decide what they choose.
    """
    if not isinstance(plot, Matrices) or plot.row_label != plot.column_label or (counts := run.counts) is None:
        return plot
    main_class, num_classes = counts.train.argmax(1), (counts.train > 0).sum(1)
    left_out = [str(client) for client in plot.panels[0].rows if plot.choices and num_classes[client] == 1]
    if len(left_out) > len(plot.panels[0].rows) - 2:  # a figure needs two clients
        left_out = []
    caption = plot.caption
    if left_out:
        caption += f" Clients of a single class, whose choice says nothing, are left out ({', '.join(left_out)})."
    panels = []
    for panel in plot.panels:
        indices = [index for index, client in enumerate(panel.rows) if str(client) not in left_out]
        clients = np.array(panel.rows)[indices]
        order = np.array(indices)[np.lexsort((clients, main_class[clients]))]
        names = [panel.rows[index] for index in order]
        panels.append(Panel(panel.title, panel.values[np.ix_(order, order)], names, names))
    return replace(plot, panels=tuple(panels), caption=f"{caption} Clients with the same main class are side by side.")
