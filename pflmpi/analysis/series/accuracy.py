"""Figures of the main measure, losses and other measures over rounds; runs of several seeds as one curve."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from pflmpi.analysis.comparable import choose_main_measure, group_by_seed
from pflmpi.analysis.metrics import CONFIDENCE, compute_margin_of_error, compute_mean, find_best_round
from pflmpi.analysis.plots import Curve, Curves, Missing, Multiples, keep_points
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import MOST_ROUNDS, NamedRun, SeedGroup, pick_evenly_spaced
from pflmpi.learning.main_measure import ACCURACY, MainMeasure, lower_is_better, to_validation_name
from pflmpi.store import metrics_file
from pflmpi.text import join_truncated

_QUANTILES = (0.1, 0.9)  # of the band over clients
_BAND = f"The band has the middle 80 % of the clients, in at most {MOST_ROUNDS} rounds that have a checkpoint."
_MOST_NAMED = 8  # groups in a caption
_BETTER = {True: "lower", False: "higher"}
_LOSS = "loss, mean over clients"
_MEASURES = {  # column of metrics.csv -> title, caption, label of the y axis, factor
    "accuracy_bottom": (
        "Accuracy of the lowest 10 % of clients over rounds",
        "Mean over the tenth of the clients with the lowest accuracy in the round.",
        "accuracy, lowest 10 % (%)",
        100,
    ),
    "f1_macro": (
        "Macro F1 over rounds",
        "Mean over clients of the plain mean of F1 over the classes that a client has or predicts.",
        "macro F1, mean over clients (%)",
        100,
    ),
    "unseen_accuracy_mean": (
        "Accuracy of unseen clients over rounds",
        "Clients that were kept out of training and join with the state of the round.",
        "accuracy, mean over unseen clients (%)",
        100,
    ),
    "trained_accuracy_mean": (
        "Accuracy after local training over rounds",
        "The participants of each round with the models that local training leaves.",
        "accuracy, mean over participants (%)",
        100,
    ),
    "accuracy_mean": ("Accuracy over rounds", "Mean over clients.", "accuracy, mean over clients (%)", 100),
    "train_loss": (
        "Training loss over rounds",
        "Mean over participants and local steps, with every term that an algorithm adds: different algorithms show "
        "different sums.",
        _LOSS,
        1,
    ),
    "test_loss": ("Test loss over rounds", "Loss of the task per test sample, mean over clients.", _LOSS, 1),
}


def plot_main_measure(runs: Sequence[NamedRun]) -> Curves | Missing:
    """The mean over clients by round, with the best round marked; for a single run also a band over clients."""
    alone, measure = len(runs) == 1, choose_measure(runs)
    curves = [
        _make_mean_curve(named_run, measure, alone)
        for named_run in runs
        if mask_evaluated(named_run, measure.column).any()
    ]
    title = f"{format_title(measure)} over rounds"
    if not curves:
        return Missing(title, "no round has been evaluated yet")
    caption = f"Mean over clients; a ring marks the best round{describe_validation_choice(runs)}."
    if alone:
        caption += f" {_BAND}"
    if alone and measure == ACCURACY and np.isnan(np.asarray(curves[0].low)).mean() > 0.5:  # few checkpoints
        columns, evaluated = runs[0].run.columns, mask_evaluated(runs[0], measure.column)
        x, y, std = (columns[name][evaluated] for name in ("round", "accuracy_mean", "accuracy_std"))
        caption += " The thin lines are one standard deviation over clients below and above the mean."
        curves += [
            Curve("mean ± standard deviation", x, np.clip(100 * (y + sign * std), 0, 100), style=1, thin=True)
            for sign in (-1, 1)
        ]
    return Curves(
        name=f"{measure.name}_over_rounds",
        title=title,
        caption=caption,
        y_label=format_mean_label(measure),
        curves=tuple(curves),
        percent=measure.percent,
    )


def choose_measure(runs: Sequence[NamedRun]) -> MainMeasure:
    """The measure by which the runs of a report are compared."""
    return choose_main_measure([named_run.run for named_run in runs])


def format_title(measure: MainMeasure) -> str:
    """The name of a measure at the start of a title: capitalised, unless it is that of a user's function."""
    if measure.words == measure.name != "accuracy":
        return measure.words
    return measure.words.capitalize()


def format_mean_label(measure: MainMeasure) -> str:
    """The label of an axis with means over clients."""
    return f"{measure.words}, mean over clients{' (%)' * measure.percent}"


def describe_validation_choice(runs: Sequence[NamedRun]) -> str:
    """For captions: how a best round was chosen, if by validation samples; "" otherwise.

    Averaged curves of several seeds mark no best round then.
    """
    measure = choose_measure(runs)
    has_validation = any(to_validation_name(measure.column) in named_run.run.columns for named_run in runs)
    return f" by validation {measure.words}, where a run has that" if has_validation else ""


def plot_bands(groups: Sequence[SeedGroup], most: int) -> list[Multiples]:
    """The bands over clients, a panel for each of the first `most` groups; empty if no run has a band."""
    measure = choose_measure([named_run for group in groups for named_run in group.runs])
    curves = [curve for group in groups[:most] if (curve := _average_bands(group, measure)) is not None]
    if all(np.isnan(np.asarray(curve.low)).all() for curve in curves):
        return []
    title, y_label = f"{format_title(measure)} of the clients over rounds", measure.axis
    name, caption = f"{measure.name}_of_clients", f"Mean over clients. {_BAND}"
    if any(len(group.runs) > 1 for group in groups[:most]):
        caption += " Of several seeds, mean and band are the means of theirs, in the rounds that all have."

    def panel(curve: Curve) -> Curves:
        return Curves(name=name, title=title, caption="", y_label=y_label, curves=(curve,), percent=measure.percent)

    parts = tuple((curve.label, panel(curve)) for curve in curves)
    return [Multiples(name=name, title=title, caption=caption + format_not_drawn(groups[most:]), parts=parts)]


def format_not_drawn(groups: Sequence[SeedGroup]) -> str:
    """A sentence that names the groups that a figure leaves out; "" if there are none."""
    return f" Not drawn: {join_truncated([group.title for group in groups], _MOST_NAMED)}." if groups else ""


def _average_bands(group: SeedGroup, measure: MainMeasure) -> Curve | None:
    """Mean and band of a group over the rounds that all seeds evaluated; those of its first run if there are none."""
    curves = [_make_mean_curve(run, measure, True) for run in group.runs if mask_evaluated(run, measure.column).any()]
    if not curves:
        return None
    if len(curves) < 2 or not (common := _keep_common_points(curves)):
        return replace(curves[0], label=group.runs[0].label if len(group.runs) > 1 else group.label)
    y, low, high = (compute_mean([getattr(curve, side) for curve in common]) for side in ("y", "low", "high"))
    mark = None if describe_validation_choice(group.runs) else _find_best(y, measure)
    return replace(curves[0], label=group.title, x=common[0].x, y=y, low=low, high=high, mark=mark)


def plot_further_measures(runs: Sequence[NamedRun]) -> list[Curves]:
    """A figure over rounds for each loss and measure that any run has, except the main measure."""
    figures: list[Curves] = []
    main_column = choose_measure(runs).column
    for column, (title, caption, y_label, factor) in {**_MEASURES, **_list_configured_measures(runs)}.items():
        if column == main_column:
            continue
        curves = []
        for named_run in runs:
            if (evaluated := mask_evaluated(named_run, column)).any():
                x, y = (named_run.run.columns[name][evaluated] for name in ("round", column))
                curves.append(Curve(named_run.legend, x, factor * y, style=named_run.style, source=named_run.label))
        if curves:
            figures.append(
                Curves(
                    name=f"{column}_over_rounds",
                    title=title,
                    caption=caption,
                    y_label=y_label,
                    curves=tuple(curves),
                    percent=factor == 100,
                )
            )
    return figures


def _list_configured_measures(runs: Sequence[NamedRun]) -> dict[str, tuple[str, str, str, int]]:
    """Entries like those of `_MEASURES` for the measures that runs have from `evaluation.measures`."""
    columns = dict.fromkeys(
        name for named_run in runs for name in metrics_file.select_measure_columns(named_run.run.columns)
    )
    measures = {name: MainMeasure(name.removesuffix("_mean")) for name in columns if name.endswith("_mean")}
    return {
        name: (
            f"{measure.words} over rounds",
            f"Mean over clients of a measure of `evaluation.measures`, of which {_BETTER[lower_is_better(name)]} "
            "values are better.",
            measure.axis,
            int(measure.scale),
        )
        for name, measure in measures.items()
    }


def read_main_by_round(run: Run, measure: MainMeasure) -> dict[int, np.ndarray]:
    """A measure [N] of the clients by round, for some evenly spaced rounds with a checkpoint that has it."""
    by_round = {number: run.metric(measure.of_clients, number) for number in pick_evenly_spaced(run.rounds)}
    return {number: values for number, values in by_round.items() if values is not None}


def mask_evaluated(named_run: NamedRun, column: str) -> np.ndarray:
    """Mask of the rounds whose value in a column is drawn, [rounds] bool."""
    columns = named_run.run.columns
    has_value = ~np.isnan(columns.get(column, np.full(len(columns["round"]), np.nan)))
    return np.asarray(has_value & (columns["round"] >= named_run.first), bool)


def _make_mean_curve(named_run: NamedRun, measure: MainMeasure, banded: bool) -> Curve:
    """The mean of a run by round, with the band over clients if `banded`."""
    run, evaluated = named_run.run, mask_evaluated(named_run, measure.column)
    rounds, mean = run.columns["round"][evaluated], measure.scale * run.columns[measure.column][evaluated]
    low = high = None
    if banded:
        low, high = np.full(len(rounds), np.nan), np.full(len(rounds), np.nan)
        for number, values in read_main_by_round(run, measure).items():
            index = np.flatnonzero(rounds == number)
            with np.errstate(invalid="ignore"):  # interpolating next to an infinite value gives NaN
                low[index], high[index] = (measure.scale * np.nanquantile(values, quantile) for quantile in _QUANTILES)
    mark = find_best_round(run.columns, evaluated, measure)
    return Curve(named_run.legend, rounds, mean, low, high, mark, style=named_run.style, source=named_run.label)


# --- several seeds


def merge_seeds(plot: Curves | Missing, runs: Sequence[NamedRun]) -> Curves | Missing:
    """Merges the curves of runs that differ only in the seed into their mean with its confidence interval."""
    if isinstance(plot, Missing):
        return plot
    groups = group_by_seed(runs)
    style_of = {named_run.label: style for style, group in enumerate(groups) for named_run in group.runs}
    curves, measure = list(plot.curves), choose_measure(runs)
    for group in groups:
        labels = {named_run.label for named_run in group.runs}
        seeds = [curve for curve in curves if curve.source in labels]
        if len(seeds) < 2 or not (common := _keep_common_points(seeds)):
            continue
        mean = _average_curves(f"{group.label}, {len(seeds)} seeds", common, plot.percent)
        if seeds[0].mark is not None and not describe_validation_choice(group.runs):
            mean = replace(mean, mark=_find_best(mean.y, measure))
        curves = [mean if curve is seeds[0] else curve for curve in curves if curve not in seeds[1:]]
    if len(curves) == len(plot.curves):
        return plot
    band = f"with its {100 * CONFIDENCE:.0f} % confidence interval (Student's t) as a band"
    mean_of_seeds = f"their mean, {band}, at the points that all have"
    caption = f"{plot.caption} Runs that differ in the seed alone are one curve: {mean_of_seeds}."
    curves = [replace(curve, style=style_of[curve.source]) for curve in curves]
    return replace(plot, curves=tuple(curves), caption=caption)


def _keep_common_points(curves: Sequence[Curve]) -> list[Curve]:
    """The curves at the rounds, or else the x, that all of them have; [] if there are none.

    Points with names, such as clients from the worst to the best, need equal numbers, and are averaged in both axes.
    """
    if curves[0].points is not None:
        return list(curves) if len({len(curve.x) for curve in curves}) == 1 else []
    places = [curve.x if curve.rounds is None else curve.rounds for curve in curves]
    common = reduce(np.intersect1d, places)
    if not len(common):
        return []
    return [keep_points(curve, np.isin(place, common)) for curve, place in zip(curves, places, strict=True)]


def _average_curves(label: str, curves: Sequence[Curve], percent: bool) -> Curve:
    """Mean of curves with as many points, with its confidence interval; no interval at infinite values."""
    x, y = (np.array([getattr(curve, axis) for curve in curves]) for axis in "xy")
    mean, margin = compute_mean(y), compute_margin_of_error(np.where(np.isfinite(y), y, np.nan))
    least, most = 0.0 if (y >= 0).all() else -np.inf, 100.0 if percent else np.inf
    low, high = (np.clip(side, least, most) for side in (mean - margin, mean + margin))
    return replace(curves[0], label=label, x=x.mean(0), y=mean, low=low, high=high, points=None)


def _find_best(values: np.ndarray, measure: MainMeasure) -> int:
    return int(values.argmin() if measure.lower else values.argmax())
