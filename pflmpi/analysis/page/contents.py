"""The figures of a report over runs, in their order."""

from collections.abc import Callable, Sequence

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.page.side_by_side import Figures
from pflmpi.analysis.plots import Missing, Plot
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun, some_of, spread_over
from pflmpi.analysis.series import accuracy, clients, cost, diagnostics, partition, similarity
from pflmpi.analysis.series.clients import Final
from pflmpi.analysis.series.partition import by_class, without_single_class
from pflmpi.errors import CheckpointError

MOST_DETAILED = 8  # runs whose checkpoints are looked into
_MOST_OF_MODELS = 12  # checkpoints from which the models of all clients are read


def compared(runs: Sequence[NamedRun], ends: Sequence[Final | None]) -> Figures:
    """The figures that show all runs."""
    several = len(runs) > 1
    return [
        accuracy.merged(accuracy.accuracy_over_rounds(runs), runs),
        *(accuracy.bands_over_rounds(runs[:MOST_DETAILED]) if several else []),
        *(
            accuracy.merged(plot, runs)
            for plot in (*accuracy.measures_over_rounds(runs), *accuracy.losses_over_rounds(runs))
        ),
        accuracy.merged(cost.accuracy_against_bytes(runs), runs),
        accuracy.merged(cost.accuracy_against_seconds(runs), runs),
        accuracy.merged(clients.distribution(runs, ends), runs),
        *clients.against_local(runs, ends),
        *partition.partitions(runs, MOST_DETAILED),
    ]


def detailed(one: NamedRun) -> tuple[Figures, list[str]]:
    """The figures of one run, and what of it could not be read."""
    found: list[Plot | Missing] = [cost.bytes_per_round(one), cost.seconds_per_round(one), *cost.imbalance(one)]
    checkpoints = _good(one.run)
    if not checkpoints:
        return [*found, Missing("Checkpoints", f"{one.run.path} has no good checkpoint")], []
    problems: list[str] = []
    makers: dict[str, Callable[[], Figures]] = {
        "Diagnostics": lambda: diagnostics.figures(checkpoints),
        "Similarity of the clients' layers": lambda: similarity.cosine_figures(some_of(checkpoints, _MOST_OF_MODELS)),
        "CKA of the clients' layers": lambda: similarity.cka_figures(one.run),
    }
    for title, make in makers.items():
        try:
            found += [by_class(without_single_class(figure, one.run), one.run) for figure in make()]
        except CheckpointError as error:
            problems.append(str(error))
            found.append(Missing(title, str(error)))
    return found, problems


def _good(run: Run) -> list[Checkpoint]:
    """Some checkpoints whose files can be opened, ascending."""
    found = []
    for number in spread_over(run.rounds):
        try:
            checkpoint = run.round(number)
            checkpoint.attributes  # noqa: B018  the file is opened here
        except CheckpointError:
            continue  # `comparable.damaged` has reported it
        found.append(checkpoint)
    return found
