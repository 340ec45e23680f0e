"""The figures of a report over runs, in their order; for notebooks, as Altair charts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.comparable import seed_groups
from pflmpi.analysis.drawing.charts import build_chart
from pflmpi.analysis.plots import Curves, Matrices, Missing, Multiples, Part, Plot, Stack, downsample
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun, SeedGroup, named, spread_over
from pflmpi.analysis.series import accuracy, clients, cost, diagnostics, partition, similarity
from pflmpi.errors import CheckpointError

Plots = Sequence[Plot | Missing]

MOST_DETAILED = 8  # runs whose checkpoints are looked into
_MOST_MODELS = 8  # checkpoints from which the models of all clients are read


def make_comparison_figures(runs: Sequence[NamedRun], groups: Sequence[SeedGroup]) -> dict[str, Plots]:
    """The figures that show all runs, by the title of their section; the first is an overview."""
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
    """Bytes, seconds and balance of ranks in each round, side by side; of several seeds their means."""
    shown, others = groups[:MOST_DETAILED], groups[MOST_DETAILED:]
    plots_of = [
        (group.title, _note_common_rounds(group, cost.plot_rounds(cost.average_columns(group), group.title)))
        for group in shown
    ]
    if sum(len(group.runs) for group in groups) == 1:
        return plots_of[0][1]
    together, rest = make_multiples(plots_of)
    shared = [replace(plot, caption=plot.caption + accuracy.format_not_drawn(others)) for plot in together]
    own = [
        replace(plot, title=f"{plot.title}: {group.title}")
        for group, plots in zip(shown, rest, strict=True)
        for plot in plots
    ]
    return [*shared, *own]


def _note_common_rounds(group: SeedGroup, plots: Plots) -> Plots:
    """The figures of a group over rounds; captions say which rounds where its seeds have unlike numbers of them."""
    if not group.common_rounds:
        return plots
    sentence = f" {group.common_rounds.capitalize()}."
    return [plot if isinstance(plot, Missing) else replace(plot, caption=plot.caption + sentence) for plot in plots]


def make_run_figures(named_run: NamedRun) -> tuple[Plots, list[str]]:
    """The figures from the checkpoints of one run, and what of them could not be read."""
    run = named_run.run
    checkpoints = _open_intact_checkpoints(run)
    if not checkpoints:
        return [Missing("Checkpoints", f"{run.path} has no good checkpoint")], []
    plots: list[Plot | Missing] = []
    problems: list[str] = []
    makers: dict[str, Callable[[], Plots]] = {
        "Diagnostics": lambda: diagnostics.plot_diagnostics(checkpoints),
        "Similarity of the clients' layers": lambda: similarity.plot_cosines(spread_over(checkpoints, _MOST_MODELS)),
        "CKA of the clients' layers": lambda: similarity.plot_cka(run),
        clients.CONFUSION: lambda: [clients.plot_confusion(run)],
    }
    for title, make in makers.items():
        try:
            plots += [partition.sort_by_class(plot, run) for plot in make()]
        except CheckpointError as error:
            problems.append(str(error))
            plots.append(Missing(title, str(error)))
    return plots, problems


def _open_intact_checkpoints(run: Run) -> list[Checkpoint]:
    """Intact checkpoints, evenly spaced, ascending."""
    checkpoints = []
    for number in spread_over(run.rounds):
        with suppress(CheckpointError):  # a report names these, by `comparable.damaged`
            checkpoints.append(run.round(number))
    return checkpoints


# --- several runs side by side

_CURVES = ("layer_cosines_over_rounds", "bytes_per_round", "imbalance")


def make_multiples(plots_of_runs: Sequence[tuple[str, Plots]]) -> tuple[list[Multiples], list[list[Plot | Missing]]]:
    """Small multiples of the figures that several runs have on common axes, and the other figures of each run.

    Args:
        plots_of_runs: the figures of each run, by its label.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, Part]]] = {}
    for label, plots in plots_of_runs:
        for plot in plots:
            if isinstance(plot, Curves | Stack | Matrices) and _has_common_axes(plot):
                unit = plot.value_label if isinstance(plot, Matrices) else plot.y_label
                groups.setdefault((type(plot), plot.name, plot.title, unit), []).append((label, plot))
    shared = [parts for parts in groups.values() if len(parts) > 1]
    moved = {id(part) for parts in shared for _, part in parts}
    rest = [[plot for plot in plots if id(plot) not in moved] for _, plots in plots_of_runs]
    return [_join_as_multiples(parts) for parts in shared], rest


def _has_common_axes(plot: Part) -> bool:
    if isinstance(plot, Matrices):
        return plot.column_label == "round" and len(plot.panels) == 1
    return isinstance(plot, Stack) or plot.name in _CURVES


def _join_as_multiples(parts: Sequence[tuple[str, Part]]) -> Multiples:
    first = parts[0][1]
    styles: dict[str, int] = {}  # of each curve, the same in all runs

    def alike(part: Part) -> Part:
        if not isinstance(part, Curves):
            return part
        curves = (replace(curve, style=styles.setdefault(curve.label, len(styles))) for curve in part.curves)
        return replace(part, curves=tuple(curves))

    return Multiples(
        name=f"{first.name}_of_runs",
        title=first.title,
        caption=_merge_captions({label: part.caption for label, part in parts}),
        parts=tuple((label, alike(part)) for label, part in parts),
    )


def _merge_captions(captions: Mapping[str, str]) -> str:
    """The sentences that all captions share, then those of single runs after their labels."""
    sentences = {
        label: [f"{text}." for text in caption.removesuffix(".").split(". ")] for label, caption in captions.items()
    }
    first, *others = sentences.values()
    common = [sentence for sentence in first if all(sentence in other for other in others)]
    own = {label: " ".join(text for text in texts if text not in common) for label, texts in sentences.items()}
    return " ".join([*common, *(f"{label}: {text}" for label, text in own.items() if text)])


# --- notebooks


class Figures:
    """The figures of a report over some runs, as Altair charts. Those of `run.figures` and `runs.figures`.

    A method for one chart raises `CheckpointError` where it cannot be drawn, and says why; `all` leaves such out.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = named(runs)

    def accuracy(self) -> Any:
        """Mean accuracy over clients by round, or the main measure of runs that have another."""
        return _to_altair(accuracy.merge_seeds(accuracy.plot_main_measure(self._runs), self._runs))

    def accuracy_against_bytes(self) -> Any:
        """Accuracy against the bytes that were sent so far."""
        return _to_altair(cost.plot_against_bytes(self._runs))

    def all(self) -> dict[str, Any]:
        """Every figure of a report by name, such as "partition"; what only checkpoints have is of the first run."""
        questions = make_comparison_figures(self._runs, seed_groups(self._runs))
        plots = [plot for of_question in questions.values() for plot in of_question] + [
            *make_run_figures(self._runs[0])[0]
        ]
        return {plot.name: _to_altair(plot) for plot in plots if not isinstance(plot, Missing)}


def _to_altair(plot: Plot | Missing) -> Any:
    if isinstance(plot, Missing):
        raise CheckpointError(f"{plot.title}: {plot.why}")
    import altair  # takes longer to import than a figure to draw

    read: Callable[[Any], Any] = altair.Chart.from_dict
    return read({**build_chart(downsample(plot)), "title": plot.title, "background": "white"})
