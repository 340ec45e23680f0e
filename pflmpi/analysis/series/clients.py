"""The clients at the end, who would be better off alone, and single clients over rounds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pflmpi.analysis.plots import Bars, Curve, Curves, Dots, Matrices, Missing, Plot
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun, spread_over
from pflmpi.analysis.series.accuracy import client_accuracy
from pflmpi.analysis.series.partition import class_names, counts_of
from pflmpi.store.partition_file import SampleCounts
from pflmpi.text import some

_TITLE = "Distribution over clients at the end"
_AGAINST = "Against local training"
_MOST_NAMED = 8  # runs in the caption
_MOST_LOSERS = 6  # clients named for each
_MOST_CHOICES = 100  # clients of a run that a reader can choose
_LAYERS = {"layer_cosines": "cosine", "layer_cka": "CKA"}  # what figures of every two clients compare


@dataclass(frozen=True, eq=False)
class Final:
    """The accuracy of each client in the newest checkpoint with scores.

    Attributes:
        round: of the checkpoint.
        accuracy: [N] in percent; NaN for clients without test samples.
    """

    round: int
    accuracy: np.ndarray


def final(run: Run) -> Final | None:
    """The accuracies of the clients at the end; None where no checkpoint has any."""
    for number in reversed(run.rounds):
        for accuracy in client_accuracy(run, [number]).values():
            return Final(number, 100 * accuracy)
    return None


def distribution(runs: Sequence[NamedRun], finals: Sequence[Final | None]) -> Curves | Missing:
    """The accuracies of the clients in ascending order, for each run."""
    known = [(one, end) for one, end in zip(runs, finals, strict=True) if end is not None]
    if not known:
        return Missing(_TITLE, "no checkpoint has the accuracies of the clients")
    without = [one.label for one, end in zip(runs, finals, strict=True) if end is None]
    caption = "Each point is a client of the newest checkpoint, from the worst to the best."
    if without:
        caption += f" Not drawn, without a checkpoint that has them: {some(without, 5)}."
    return Curves(
        name="clients_at_the_end",
        title=_TITLE,
        caption=caption,
        x_label="share of the clients (%)",
        y_label="accuracy (%)",
        curves=tuple(_ascending(one, end.accuracy) for one, end in known),
        percent=True,
    )


def against_local(runs: Sequence[NamedRun], finals: Sequence[Final | None]) -> list[Dots | Missing]:
    """By how much each client is better than when it trains alone: a figure for each run of local training."""
    locals_, gains = against(runs, finals)
    if not locals_:
        return [Missing(_AGAINST, "no run among these sends nothing; add one of local training, on the same partition")]
    if not gains:
        names = some([local.label for local in locals_])
        return [Missing(_AGAINST, f"no other run has the same data and partition as {names}")]
    groups = [(local, [(one, gain) for one, base, gain in gains if base is local]) for local in locals_]
    shown = [_against_local(local, group) for local, group in groups if group]
    if len(shown) == 1:
        return list(shown)
    labels = [local.label for local, group in groups if group]
    return [
        replace(plot, title=f"{_AGAINST}: {label}", name=plot.name + (f"_{number}" if number > 1 else ""))
        for number, (plot, label) in enumerate(zip(shown, labels, strict=True), 1)
    ]


def _against_local(local: NamedRun, gains: Sequence[tuple[NamedRun, np.ndarray]]) -> Dots:
    losers = "; ".join(_losers(one, gain) for one, gain in gains[:_MOST_NAMED])
    mean = np.array([gain for _, gain in gains]).mean(0)
    clients = np.flatnonzero(~np.isnan(mean))
    clients = clients[np.argsort(mean[clients], kind="stable")]
    return Dots(
        name="against_local",
        title=_AGAINST,
        caption=f"Accuracy minus that of the same client in {local.label}, a row for each client, from the worst to "
        f"the best{' mean' if len(gains) > 1 else ''}; left of zero are clients who would do better alone. {losers}.",
        row_label="client (training samples)",
        x_label="gain over local (percentage points)",
        rows=tuple(_names(local.run, clients)),
        clients=tuple(clients.tolist()),
        series={one.label: gain[clients] for one, gain in gains},
        styles=tuple(one.style for one, _ in gains),
    )


def against(
    runs: Sequence[NamedRun], finals: Sequence[Final | None]
) -> tuple[list[NamedRun], list[tuple[NamedRun, NamedRun, np.ndarray]]]:
    """The runs of local training, and the gains over these.

    A gain is a run, the run of local training with the same clients, of several that of the same seed, and by how many
    percentage points [N] each client is better in the first. Runs without such a run of local training have none.
    """
    known = [(one, end) for one, end in zip(runs, finals, strict=True) if end is not None]
    alone = [each for each in known if _local(each[0].run) and "partition" in each[0].run.config.get("recorded", {})]
    gains = []
    for one, end in known:
        same = [each for each in alone if not _local(one.run) and _division(one.run) == _division(each[0].run)]
        if same:
            seed = one.run.config.get("seed")
            base, alone_end = next((each for each in same if each[0].run.config.get("seed") == seed), same[0])
            gains.append((one, base, end.accuracy - alone_end.accuracy))
    return [local for local, _ in alone], gains


def _division(run: Run) -> tuple[str, str]:
    """The hashes of a run's data and partition."""
    recorded = run.config.get("recorded", {})
    return str(recorded.get("data")), str(recorded.get("partition"))


def _names(run: Run, clients: np.ndarray) -> list[str]:
    """Clients with their number of training samples, where the run has recorded that."""
    counts = counts_of(run)
    samples = None if counts is None else counts.train.sum(1)
    return [str(client) if samples is None else f"{client} ({samples[client]})" for client in clients.tolist()]


def _local(run: Run) -> bool:
    """Whether the clients have trained alone: nothing was sent in any round."""
    columns = run.columns
    return len(columns["round"]) > 0 and not (columns["up_bytes"].any() or columns["down_bytes"].any())


def _ascending(one: NamedRun, values: np.ndarray) -> Curve:
    clients = np.flatnonzero(~np.isnan(values))
    clients = clients[np.argsort(values[clients], kind="stable")]
    share = 100 * (np.arange(len(clients)) + 0.5) / max(len(clients), 1)
    return Curve(one.legend, share, values[clients], points=clients, style=one.style, source=one.label)


def _losers(one: NamedRun, gain: np.ndarray) -> str:
    losing = np.flatnonzero(gain < 0)
    if not len(losing):
        return f"{one.label}: nobody loses"
    worst = losing[np.argsort(gain[losing], kind="stable")]
    clients = [f"{client} ({gain[client]:.1f})" for client in worst.tolist()]
    return f"{one.label}: {len(losing)} of {len(gain)} lose, client {some(clients, _MOST_LOSERS)}"


# --- one client at a time


def single_clients(runs: Sequence[NamedRun], figures: Sequence[Sequence[Plot | Missing]]) -> list[Plot]:
    """Figures of one client that the reader chooses: accuracy, other numbers, layers and samples, in each run.

    Args:
        figures: of each run; those with a number of each client are shown client by client.
    """
    accuracies = []
    for one, _ in zip(runs, figures, strict=False):
        if accuracy := client_accuracy(one.run, spread_over(one.run.rounds)):
            accuracies.append((one, np.array(list(accuracy)), 100 * np.stack(list(accuracy.values()), axis=1)))
    if not accuracies:
        return []
    shown: list[Plot] = [_of_clients("client_accuracy", "Accuracy", "round", "accuracy (%)", accuracies)]
    numbers: dict[tuple[str, str, str], list[tuple[NamedRun, np.ndarray, np.ndarray]]] = {}
    layers: dict[str, list[tuple[NamedRun, Matrices]]] = {}
    for one, own in zip(runs, figures, strict=False):
        for plot in own:
            if not isinstance(plot, Matrices) or plot.categories:
                continue
            if (plot.row_label, plot.column_label) == ("client", "round"):
                (panel,) = plot.panels
                values = (one, np.array(panel.columns), panel.values)
                numbers.setdefault((plot.name, plot.title, plot.value_label), []).append(values)
            elif plot.name in _LAYERS:
                layers.setdefault(plot.name, []).append((one, plot))
    shown += [
        _of_clients(f"client_{name}", title, "round", label, values) for (name, title, label), values in numbers.items()
    ]
    shown += [_layers(name, plots) for name, plots in layers.items()]
    samples = _samples(runs[: len(figures)])
    return [*shown, *([samples] if samples else [])]


def _of_clients(
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    values: Sequence[tuple[NamedRun, np.ndarray, np.ndarray]],
    x_names: Sequence[str] = (),
) -> Curves:
    """Curves of one client at a time from x [R] and values [N, R] of runs."""
    most = max(len(rows) for _, _, rows in values)
    curves = tuple(
        Curve(one.label, x, rows[client], style=one.style, source=one.label, client=client)
        for one, x, rows in values
        for client in spread_over(range(len(rows)), _MOST_CHOICES)
        if not np.isnan(rows[client]).all()
    )
    return Curves(
        name=name,
        title=f"{title} of a client",
        caption=f"{_MOST_CHOICES} of {most} clients can be chosen, evenly spaced." if most > _MOST_CHOICES else "",
        x_label=x_label,
        y_label=y_label,
        curves=curves,
        x_names=tuple(x_names),
        by_round=x_label == "round",
        percent=y_label.endswith("(%)"),
        single_client=True,
    )


def _layers(name: str, plots: Sequence[tuple[NamedRun, Matrices]]) -> Curves:
    """How similar each layer of a client is to those of the others, on average."""
    names = list(dict.fromkeys(panel.title for _, plot in plots for panel in plot.panels))
    values = []
    for one, plot in plots:
        count = 1 + max(int(client) for panel in plot.panels for client in panel.rows)
        means = np.full((count, len(names)), np.nan)
        for panel in plot.panels:
            means[np.array(panel.rows, int), names.index(panel.title)] = _with_others(panel.values)
        values.append((one, np.arange(1, len(names) + 1), means))
    return _of_clients(f"client_{name}", "Layers", "layer", f"mean {_LAYERS[name]} with other clients", values, names)


def _with_others(matrix: np.ndarray) -> np.ndarray:
    """The mean [m] of the known values of each row [m, m] beside the diagonal; NaN without any."""
    values = np.array(matrix, np.float64)
    np.fill_diagonal(values, np.nan)
    known = np.isfinite(values)
    means = np.full(len(values), np.nan)
    np.divide(np.where(known, values, 0).sum(1), known.sum(1), out=means, where=known.any(1))
    return means


def _samples(runs: Sequence[NamedRun]) -> Bars | None:
    """Training and test samples of a client by class, once for the runs that have the same."""
    divisions: dict[bytes, tuple[SampleCounts, list[NamedRun]]] = {}
    for one in runs:
        if (counts := counts_of(one.run)) is not None:
            key = counts.train.tobytes() + counts.test.tobytes()
            divisions.setdefault(key, (counts, []))[1].append(one)
    if not divisions:
        return None
    bars = []
    for counts, owners in divisions.values():
        names = class_names(owners[0].run, counts.train.shape[1])
        for part, samples in (("training", counts.train), ("test", counts.test)):
            for client in spread_over(range(len(samples)), _MOST_CHOICES):
                panel = some([one.label for one in owners])
                bars += [
                    (client, panel, names[k], part, int(samples[client, k])) for k in np.flatnonzero(samples[client])
                ]
    return Bars(
        name="client_samples",
        title="Samples of a client",
        caption="",
        x_label="class",
        y_label="samples",
        names=tuple(names),
        bars=tuple(bars),
    )
