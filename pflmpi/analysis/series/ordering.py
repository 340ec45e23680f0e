"""The order of clients in figures: those with the same main class side by side."""

from dataclasses import replace

import numpy as np

from pflmpi.analysis.plots import Matrices, Missing, Panel, Plot
from pflmpi.analysis.run import Run
from pflmpi.analysis.series.partition import counts_of


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
