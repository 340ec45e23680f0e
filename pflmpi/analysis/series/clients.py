"""Figures of clients: their final values, gains over local training, and single clients over rounds."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pflmpi.analysis.plots import Bars, Curve, Curves, Matrices, Missing, Panel, Plot
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun, choose_clients
from pflmpi.analysis.series.accuracy import choose_measure, format_title, read_main_by_round
from pflmpi.analysis.series.partition import group_by_partition, read_class_names
from pflmpi.analysis.series.similarity import NOT_PROBED
from pflmpi.learning.main_measure import MainMeasure
from pflmpi.store import probe_file
from pflmpi.text import join_truncated, pluralize

CONFUSION = "Confusion matrix"
_TITLE = "Distribution over clients at the end"
_AGAINST = "Against local training"
_SHARE = "share of the clients (%)"
_MOST_NAMED = 8  # runs in a caption
_MOST_LOSERS = 3  # clients named for each run
_LAYER_MEASURES = {"layer_cosines": "cosine", "layer_cka": "CKA"}  # name of a figure of pairs -> its measure


def plot_distribution(runs: Sequence[NamedRun]) -> Curves | Missing:
    """The final main measure of the clients from the worst to the best, a curve for each run."""
    curves, missing, measure = [], [], choose_measure(runs)
    for named_run in runs:
        values = named_run.run.final(measure)
        if values is None:
            missing.append(named_run.label)
            continue
        values = measure.scale * values
        curves.append(_make_sorted_curve(named_run, named_run.legend, values, descending=measure.lower))
    if not curves:
        return Missing(_TITLE, f"no checkpoint has the {measure.words} of the clients")
    caption = "Each point is a client of the newest checkpoint that has its value, from the worst to the best."
    if missing:
        caption += f" Not drawn, without a checkpoint that has them: {join_truncated(missing, 5)}."
    return Curves(
        name="clients_at_the_end",
        title=_TITLE,
        caption=caption,
        x_label=_SHARE,
        y_label=measure.axis,
        curves=tuple(curves),
        percent=measure.percent,
    )


def plot_class_accuracy(runs: Sequence[NamedRun]) -> list[Curves]:
    """The final accuracy of each class, a curve for each run; empty if no checkpoint has it."""
    accuracies = [
        (named_run, accuracy)
        for named_run in runs
        if (accuracy := named_run.run.newest_metric("class_accuracy")[0]) is not None
    ]
    if not accuracies:
        return []
    names = read_class_names(accuracies[0][0].run, len(accuracies[0][1]))
    curves = (
        Curve(run.legend, np.arange(1, len(names) + 1), 100 * accuracy, style=run.style, source=run.label)
        for run, accuracy in accuracies
        if len(accuracy) == len(names)
    )
    return [
        Curves(
            name="accuracy_by_class",
            title="Accuracy by class",
            caption="Test samples of all clients together, in the newest checkpoint that has it.",
            x_label="class",
            y_label="accuracy (%)",
            curves=tuple(curves),
            x_names=tuple(names),
            percent=True,
        )
    ]


def plot_confusion(run: Run) -> Matrices | Missing:
    """The confusion matrix of the clients' models in the last probe.

    Raises:
        CheckpointError: the probe is damaged, or of a newer format.
    """
    rounds = probe_file.rounds(run.path)
    if not rounds:
        return Missing(CONFUSION, NOT_PROBED)
    probe = probe_file.read(run.path, rounds[-1])
    if probe.confusion is None:
        return Missing(CONFUSION, "the last probe has none, as labels are no classes")
    names = read_class_names(run, len(probe.confusion))
    samples = probe.confusion.sum(1, keepdims=True)
    values = np.divide(100.0 * probe.confusion, samples, out=np.full(probe.confusion.shape, np.nan), where=samples > 0)
    return Matrices(
        name="confusion",
        title=f"{CONFUSION}, round {probe.round}",
        caption=(
            "Which share of the test samples of a class, of all clients together, is taken for which class by the "
            "clients' own models. The diagonal, which is right, is not drawn."
        ),
        row_label="class",
        column_label="taken for",
        value_label="samples of the class (%)",
        panels=(Panel("", values, names, names),),
        hide_diagonal=True,
    )


def _argsort_known(values: np.ndarray) -> np.ndarray:
    """Indices that sort the values that are not NaN."""
    order = np.argsort(values, kind="stable")  # NaNs are last
    return np.asarray(order[: np.count_nonzero(~np.isnan(values))])


def _make_sorted_curve(named_run: NamedRun, label: str, values: np.ndarray, descending: bool = False) -> Curve:
    """The values [N] of the clients of a run in ascending or descending order."""
    clients = _argsort_known(-values if descending else values)
    share = 100 * (np.arange(len(clients)) + 0.5) / max(len(clients), 1)
    return Curve(label, share, values[clients], points=clients, style=named_run.style, source=named_run.label)


# --- against local training


def plot_against_local(runs: Sequence[NamedRun]) -> list[Curves | Missing]:
    """The gain of each client over local training, a figure for each run of local training."""
    local_runs, gains = compute_gains_over_local(runs)
    if not local_runs:
        return [Missing(_AGAINST, "no run among these sends nothing; add one of local training, on the same partition")]
    if not gains:
        names = join_truncated([local.label for local in local_runs])
        return [Missing(_AGAINST, f"no other run has the same data and partition as {names}")]
    plots: list[tuple[NamedRun, Curves]] = []
    for local in local_runs:
        if gains_over := [(named_run, gain) for named_run, base, gain in gains if base is local]:
            plots.append((local, _plot_gains(local, gains_over, choose_measure(runs))))
    if len(plots) == 1:
        return [plots[0][1]]
    return [replace(plot, title=f"{_AGAINST}: {local.label}") for local, plot in plots]


def _plot_gains(local: NamedRun, gains: Sequence[tuple[NamedRun, np.ndarray]], measure: MainMeasure) -> Curves:
    losers = "; ".join(
        _describe_losers(named_run, gain, 1 if measure.percent else 4) for named_run, gain in gains[:_MOST_NAMED]
    )
    return Curves(
        name="against_local",
        title=_AGAINST,
        caption=f"How far the {measure.words} is {'below' if measure.lower else 'above'} that of the same client in "
        f"{local.label}, from the client that loses most to the one that gains most; clients below zero would do "
        f"better alone. {losers}.",
        x_label=_SHARE,
        y_label=f"gain over local ({'percentage points' if measure.percent else measure.words})",
        curves=tuple(_make_sorted_curve(named_run, named_run.label, gain) for named_run, gain in gains),
        zero=True,
    )


def _describe_losers(named_run: NamedRun, gain: np.ndarray, digits: int) -> str:
    count = int((gain < 0).sum())
    if not count:
        return f"{named_run.label}: no client loses"
    clients = ", ".join(
        f"{client} ({gain[client]:.{digits}f})" for client in _argsort_known(gain)[: min(count, _MOST_LOSERS)]
    )
    more = f" and {count - _MOST_LOSERS} more" if count > _MOST_LOSERS else ""
    return f"{named_run.label}: {count} of {len(gain)} lose, client {clients}{more}"


def compute_gains_over_local(
    runs: Sequence[NamedRun],
) -> tuple[list[NamedRun], list[tuple[NamedRun, NamedRun, np.ndarray]]]:
    """The runs of local training, and the gains of other runs over them.

    Each gain is a run, the run of local training on the same data and partition that it is compared with (preferably
    with the same seed), and how much better each client [N] is in the first; shares are in percentage points. Runs
    without such a run of local training have no gain.
    """
    measure = choose_measure(runs)
    scale = -measure.scale if measure.lower else measure.scale
    tested = [(named_run, scale * values) for named_run in runs if (values := named_run.run.final(measure)) is not None]
    local_runs = [pair for pair in tested if _is_local(pair[0].run) and "partition" in pair[0].run.recorded]
    gains = []
    for named_run, values in tested:
        run = named_run.run
        if _is_local(run):
            continue
        candidates = [pair for pair in local_runs if _hash_samples(run) == _hash_samples(pair[0].run)]
        if candidates:
            same_seed = (pair for pair in candidates if pair[0].run.config.get("seed") == run.config.get("seed"))
            local, base = next(same_seed, candidates[0])
            with np.errstate(invalid="ignore"):  # equal infinities have no difference
                gains.append((named_run, local, values - base))
    return [local for local, _ in local_runs], gains


def describe_gains(runs: Sequence[NamedRun]) -> str:
    """How the gain over local training is computed, and which run each is compared with; "" if there is no gain."""
    labels_by_local: dict[NamedRun, list[str]] = {}
    for named_run, local, _ in compute_gains_over_local(runs)[1]:
        labels_by_local.setdefault(local, []).append(named_run.label)
    if not labels_by_local:
        return ""
    bases = [
        f"{local.label} ({pluralize(len(local.run.columns['round']), 'round')}) for "
        f"{join_truncated(labels, _MOST_NAMED)}"
        for local, labels in labels_by_local.items()
    ]
    measure = choose_measure(runs)
    unit, sense = ", in percentage points" * measure.percent, "below" if measure.lower else "above"
    return (
        f"Gain over local{unit}: how far the {measure.words} in the newest checkpoint that has it is {sense} that of "
        f"the same client, mean over clients, in {'; in '.join(bases)}."
    )


def _hash_samples(run: Run) -> tuple[str, str]:
    """The recorded hashes of data and partition."""
    return str(run.recorded.get("data")), str(run.recorded.get("partition"))


def _is_local(run: Run) -> bool:
    """Whether the clients trained alone: nothing was sent in any round."""
    columns = run.columns
    return len(columns["round"]) > 0 and not (columns["up_bytes"].any() or columns["down_bytes"].any())


# --- one client at a time

Rows = tuple[NamedRun, np.ndarray, np.ndarray]  # a run, x [R] and the values [N, R] of its clients


def plot_single_clients(runs: Sequence[NamedRun], figures: Sequence[Sequence[Plot | Missing]]) -> list[Plot]:
    """Figures of one client at a time, which the reader selects: measures, diagnostics, layers and samples by run.

    Args:
        figures: the figures of each run; the values of matrices with a row for each client become curves.
    """
    measure, main_rows = choose_measure(runs), list[Rows]()
    numbers: dict[tuple[str, str, str], list[Rows]] = {}
    layers: dict[str, list[tuple[NamedRun, Matrices]]] = {}
    choices: list[int] = []  # clients that can be selected, the same in all runs
    for named_run, plots in zip(runs, figures, strict=False):
        if by_round := read_main_by_round(named_run.run, measure):
            values = measure.scale * np.stack(list(by_round.values()), axis=1)
            main_rows.append((named_run, np.array(list(by_round)), values))
            choices = choices or choose_clients(named_run.run.round(max(by_round))).tolist()
        for plot in plots:
            if not isinstance(plot, Matrices) or plot.categories:
                continue
            if (plot.row_label, plot.column_label) == ("client", "round"):
                (panel,) = plot.panels
                rows = (named_run, np.array(panel.columns), panel.values)
                numbers.setdefault((plot.name, plot.title, plot.value_label), []).append(rows)
            elif plot.name in _LAYER_MEASURES:
                layers.setdefault(plot.name, []).append((named_run, plot))
    if not main_rows:
        return []
    return [
        _plot_selected_client(
            f"client_{measure.name}", format_title(measure), "round", measure.axis, main_rows, choices
        ),
        *(
            _plot_selected_client(f"client_{name}", title, "round", label, rows, choices)
            for (name, title, label), rows in numbers.items()
        ),
        *(_plot_layers(name, matrices, choices) for name, matrices in layers.items()),
        *_plot_samples(runs[: len(figures)], choices),
    ]


def _plot_selected_client(
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    rows_of_runs: Sequence[Rows],
    choices: Sequence[int],
    x_names: Sequence[str] = (),
) -> Curves:
    """Curves of one client at a time; `choices` are the clients that can be selected."""
    most = max(len(rows) for _, _, rows in rows_of_runs)
    curves = tuple(
        Curve(named_run.label, x, rows[client], style=named_run.style, source=named_run.label, client=client)
        for named_run, x, rows in rows_of_runs
        for client in choices
        if client < len(rows) and not np.isnan(rows[client]).all()
    )
    return Curves(
        name=name,
        title=f"{title} of a client",
        caption=f"{len(choices)} of {most} clients can be chosen." if most > len(choices) else "",
        x_label=x_label,
        y_label=y_label,
        curves=curves,
        x_names=tuple(x_names),
        percent=y_label.endswith("(%)"),
        single_client=True,
    )


def _plot_layers(name: str, matrices: Sequence[tuple[NamedRun, Matrices]], choices: Sequence[int]) -> Curves:
    """Mean similarity of each layer of a client to that layer of the other clients."""
    names = list(dict.fromkeys(panel.title for _, plot in matrices for panel in plot.panels))
    rows = []
    for named_run, plot in matrices:
        count = 1 + max(int(client) for panel in plot.panels for client in panel.rows)
        means = np.full((count, len(names)), np.nan)
        for panel in plot.panels:
            similarity = panel.drawn_values(hide_diagonal=True)
            finite = np.isfinite(similarity)
            mean = np.where(finite, similarity, 0).sum(1) / np.where(finite.any(1), finite.sum(1), np.nan)
            means[np.array(panel.rows, int), names.index(panel.title)] = mean
        rows.append((named_run, np.arange(1, len(names) + 1), means))
    return _plot_selected_client(
        f"client_{name}", "Layers", "layer", f"mean {_LAYER_MEASURES[name]} with other clients", rows, choices, names
    )


def _plot_samples(runs: Sequence[NamedRun], choices: Sequence[int]) -> list[Bars]:
    """Samples of a client by class, with a panel for each partition."""
    bars: list[tuple[int, str, str, str, int]] = []
    names: list[str] = []
    for counts, owners in group_by_partition(runs):
        if counts is None:
            continue
        names = read_class_names(owners[0].run, counts.train.shape[1])
        panel = join_truncated([named_run.label for named_run in owners])
        for part, samples in zip(("training", "test", "validation"), counts.sides.values(), strict=False):
            for client in (client for client in choices if client < len(samples)):
                labels = np.flatnonzero(samples[client])
                bars += [(client, panel, names[label], part, int(samples[client, label])) for label in labels]
    if not bars:
        return []
    return [
        Bars(
            name="client_samples",
            title="Samples of a client",
            caption="",
            x_label="class",
            y_label="samples",
            names=tuple(names),
            bars=tuple(bars),
        )
    ]
