"""The figures of a report over runs, in order, and as Altair charts for notebooks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.comparable import group_by_seed
from pflmpi.analysis.drawing.charts import build_chart
from pflmpi.analysis.plots import Curves, Matrices, Missing, Multiples, Part, Plot, Stack, downsample, make_names_unique
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun, SeedGroup, name_runs, pick_evenly_spaced
from pflmpi.analysis.series import accuracy, clients, cost, diagnostics, partition, similarity
from pflmpi.errors import CheckpointError

Plots = Sequence[Plot | Missing]

MOST_DETAILED = 8  # groups of runs with figures of their own
_RETRIES = 5  # with the newest checkpoint of a run that prunes those that are being read
_MOST_MODELS = 8  # checkpoints of which the models of all clients are read


def make_comparison_figures(runs: Sequence[NamedRun], groups: Sequence[SeedGroup]) -> dict[str, Plots]:
    """The figures that compare all runs, by the title of their section; the first section is an overview."""
    against = clients.plot_against_local(runs)
    return {
        "Overview": [
            accuracy.merge_seeds(accuracy.plot_main_measure(runs), runs),
            accuracy.merge_seeds(cost.plot_against_bytes(runs), runs),
            accuracy.merge_seeds(cost.plot_against_seconds(runs), runs),
            accuracy.merge_seeds(clients.plot_distribution(runs), runs),
            *(against if len(against) == 1 else []),
        ],
        "Against local training": against if len(against) > 1 else [],
        "Further measures": [
            *(accuracy.plot_bands(groups, MOST_DETAILED) if len(runs) > 1 else []),
            *(accuracy.merge_seeds(plot, runs) for plot in accuracy.plot_further_measures(runs)),
            *(accuracy.merge_seeds(plot, runs) for plot in clients.plot_class_accuracy(runs)),
        ],
        "Bytes and time of rounds": make_round_figures(groups),
        "Samples of the clients": partition.plot_partitions(runs, MOST_DETAILED),
    }


def make_round_figures(groups: Sequence[SeedGroup]) -> Plots:
    """Bytes, seconds and load balance of each round, averaged over seeds; several groups side by side."""
    drawn, not_drawn = groups[:MOST_DETAILED], groups[MOST_DETAILED:]
    plots_by_title = [(group.title, cost.plot_rounds(cost.average_columns(group), group.title)) for group in drawn]
    if sum(len(group.runs) for group in groups) == 1:
        return plots_by_title[0][1]
    multiples, rest = make_multiples(plots_by_title)
    shared = [replace(plot, caption=plot.caption + accuracy.format_not_drawn(not_drawn)) for plot in multiples]
    own = [
        replace(plot, title=f"{plot.title}: {group.title}")
        for group, plots in zip(drawn, rest, strict=True)
        for plot in plots
    ]
    return [*shared, *own]


def make_run_figures(named_run: NamedRun) -> tuple[Plots, list[str]]:
    """The figures of a run that need its checkpoints or probes, and the problems of files that could not be read."""
    run = named_run.run
    checkpoints = _open_intact_checkpoints(run)
    if not checkpoints:
        return [Missing("Checkpoints", f"{run.path} has no good checkpoint")], []
    plots: list[Plot | Missing] = []
    problems: list[str] = []
    makers: dict[str, Callable[[Sequence[Checkpoint]], Plots]] = {
        "Diagnostics": diagnostics.plot_diagnostics,
        "Similarity of the clients' layers": lambda among: similarity.plot_cosines(
            pick_evenly_spaced(among, _MOST_MODELS)
        ),
        "CKA of the clients' layers": lambda _: similarity.plot_cka(run),
        clients.CONFUSION: lambda _: [clients.plot_confusion(run)],
    }
    for title, make in makers.items():
        try:
            plots += [partition.sort_by_class(plot, run) for plot in _make_figures(run, make, checkpoints)]
        except CheckpointError as error:
            problems.append(str(error))
            plots.append(Missing(title, str(error)))
    return plots, problems


def _make_figures(run: Run, make: Callable[[Sequence[Checkpoint]], Plots], checkpoints: Sequence[Checkpoint]) -> Plots:
    """Makes figures of checkpoints, or of the newest one if the run has pruned others meanwhile."""
    for _ in range(_RETRIES):
        try:
            return make(checkpoints)
        except CheckpointError:
            if all(checkpoint.number in run.rounds for checkpoint in checkpoints):
                raise
            checkpoints = [run.newest()[0]]
    return make(checkpoints)


def _open_intact_checkpoints(run: Run) -> list[Checkpoint]:
    """Some evenly spaced checkpoints of a run, ascending, without those that it has pruned meanwhile."""
    checkpoints = []
    for number in pick_evenly_spaced(run.rounds):
        with suppress(CheckpointError):  # `comparable.check_shown` raises if it is damage
            checkpoints.append(run.round(number))
    return checkpoints


# --- several runs side by side

_CURVES_IN_MULTIPLES = ("layer_cosines_over_rounds", "bytes_per_round", "imbalance")


def make_multiples(plots_of_runs: Sequence[tuple[str, Plots]]) -> tuple[list[Multiples], list[list[Plot | Missing]]]:
    """Joins the figures that several runs share into small multiples.

    Args:
        plots_of_runs: label and figures of each run.

    Returns:
        The small multiples, and the remaining figures of each run.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, Part]]] = {}
    for label, plots in plots_of_runs:
        for plot in plots:
            if isinstance(plot, Curves | Stack | Matrices) and _has_common_axes(plot):
                unit = plot.value_label if isinstance(plot, Matrices) else plot.y_label
                groups.setdefault((type(plot), plot.name, plot.title, unit), []).append((label, plot))
    shared = [parts for parts in groups.values() if len(parts) > 1]
    joined = {id(part) for parts in shared for _, part in parts}
    rest = [[plot for plot in plots if id(plot) not in joined] for _, plots in plots_of_runs]
    return [_join_as_multiples(parts) for parts in shared], rest


def _has_common_axes(plot: Part) -> bool:
    """Whether figures of this kind from several runs make sense on common axes."""
    if isinstance(plot, Matrices):
        return plot.column_label == "round" and len(plot.panels) == 1
    return isinstance(plot, Stack) or plot.name in _CURVES_IN_MULTIPLES


def _join_as_multiples(parts: Sequence[tuple[str, Part]]) -> Multiples:
    first = parts[0][1]
    styles: dict[str, int] = {}  # a curve has the same style in all runs

    def restyle(part: Part) -> Part:
        if not isinstance(part, Curves):
            return part
        curves = (replace(curve, style=styles.setdefault(curve.label, len(styles))) for curve in part.curves)
        return replace(part, curves=tuple(curves))

    return Multiples(
        name=f"{first.name}_of_runs",
        title=first.title,
        caption=_merge_captions({label: part.caption for label, part in parts}),
        parts=tuple((label, restyle(part)) for label, part in parts),
    )


def _merge_captions(captions: Mapping[str, str]) -> str:
    """The sentences that all captions share, then each label with its own sentences."""
    sentences = {
        label: [f"{text}." for text in caption.removesuffix(".").split(". ")] for label, caption in captions.items()
    }
    first, *others = sentences.values()
    common = [sentence for sentence in first if all(sentence in other for other in others)]
    own = {label: " ".join(text for text in texts if text not in common) for label, texts in sentences.items()}
    return " ".join([*common, *(f"{label}: {text}" for label, text in own.items() if text)])


# --- notebooks


class Figures:
    """The figures of a report as Altair charts: `run.figures` and `runs.figures`.

    A method for one chart raises `CheckpointError` if it cannot be drawn; `all` leaves it out.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = name_runs(runs)

    def accuracy(self) -> Any:
        """Mean accuracy over clients by round, or the main measure of the runs if it is another."""
        return _to_altair(accuracy.merge_seeds(accuracy.plot_main_measure(self._runs), self._runs))

    def accuracy_against_bytes(self) -> Any:
        """Accuracy, or another main measure, against the bytes sent so far."""
        return _to_altair(cost.plot_against_bytes(self._runs))

    def all(self) -> dict[str, Any]:
        """Every figure of a report by name, such as "partition"; figures of checkpoints are those of the first run.

        Names that several figures have are followed by numbers, as in "partition-2".
        """
        sections = make_comparison_figures(self._runs, group_by_seed(self._runs))
        run_figures, _ = make_run_figures(self._runs[0])
        plots = make_names_unique([*chain.from_iterable(sections.values()), *run_figures])
        return {plot.name: _to_altair(plot) for plot in plots if not isinstance(plot, Missing)}


def _to_altair(plot: Plot | Missing) -> Any:
    if isinstance(plot, Missing):
        raise CheckpointError(f"{plot.title}: {plot.why}")
    import altair  # slow to import, and only notebooks need it

    from_dict: Callable[[Any], Any] = altair.Chart.from_dict
    return from_dict({**build_chart(downsample(plot)), "title": plot.title, "background": "white"})
