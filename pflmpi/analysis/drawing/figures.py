"""Figures of runs for notebooks: `run.figures.accuracy()` is an Altair chart."""

from collections.abc import Callable, Sequence
from typing import Any

from pflmpi.analysis.drawing.charts import chart
from pflmpi.analysis.drawing.thinning import thinned
from pflmpi.analysis.page.contents import detailed
from pflmpi.analysis.plots import Missing, Plot
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import named
from pflmpi.analysis.series import accuracy, clients, cost, partition
from pflmpi.errors import CheckpointError


class Figures:
    """The figures of a report over some runs, as Altair charts. Those of `run.figures` and `runs.figures`.

    Each method that returns one chart raises `CheckpointError` where it cannot be drawn, and says why; those that
    return several leave out what cannot be drawn.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = named(runs)

    def accuracy(self) -> Any:
        """Mean accuracy over clients by round."""
        return _chart(accuracy.merged(accuracy.accuracy_over_rounds(self._runs), self._runs))

    def measures(self) -> dict[str, Any]:
        """Further measures and losses by round, by name."""
        return _charts([*accuracy.measures_over_rounds(self._runs), *accuracy.losses_over_rounds(self._runs)])

    def accuracy_against_bytes(self) -> Any:
        """Accuracy against the bytes that were sent so far."""
        return _chart(cost.accuracy_against_bytes(self._runs))

    def accuracy_against_time(self) -> Any:
        """Accuracy against the seconds of all rounds so far."""
        return _chart(cost.accuracy_against_seconds(self._runs))

    def clients(self) -> Any:
        """The accuracies of the clients at the end, in ascending order."""
        return _chart(clients.distribution(self._runs, [clients.final(one.run) for one in self._runs]))

    def against_local(self) -> dict[str, Any]:
        """Gains of each client over training alone, by name: a chart for each run of local training."""
        return _charts(clients.against_local(self._runs, [clients.final(one.run) for one in self._runs]))

    def partition(self) -> dict[str, Any]:
        """Samples of each client and class, by name: a chart for each partition."""
        return _charts(partition.partitions(self._runs, len(self._runs)))

    def details(self) -> dict[str, Any]:
        """What a report shows of the first run alone, by name: bytes, time, diagnostics, similarity of layers."""
        return _charts(detailed(self._runs[0])[0])


def _chart(plot: Plot | Missing) -> Any:
    if isinstance(plot, Missing):
        raise CheckpointError(f"{plot.title}: {plot.why}")
    return _altair(plot)


def _charts(plots: Sequence[Plot | Missing]) -> dict[str, Any]:
    return {plot.name: _altair(plot) for plot in plots if not isinstance(plot, Missing)}


def _altair(plot: Plot) -> Any:
    import altair  # takes longer to import than a figure to draw

    shown = thinned(plot)
    read: Callable[[Any], Any] = altair.Chart.from_dict
    return read({**chart(shown), "title": plot.title, "background": "white"})
