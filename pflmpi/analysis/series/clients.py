"""The clients at the end, who would be better off alone, and single clients over rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pflmpi.analysis.plots import Curve, Curves, Dots, Missing
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import NamedRun
from pflmpi.analysis.series.accuracy import client_accuracy
from pflmpi.analysis.series.partition import counts_of
from pflmpi.text import some

_TITLE = "Distribution over clients at the end"
_AGAINST = "Against local training"
_MOST_NAMED = 8  # runs in the caption
_MOST_LOSERS = 6  # clients named for each


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


def against_local(runs: Sequence[NamedRun], finals: Sequence[Final | None]) -> Dots | Missing:
    """By how much each client is better than when it trains alone, for each run with the same clients."""
    local, gains = against(runs, finals)
    if local is None:
        return Missing(_AGAINST, "no run among these sends nothing; add one of local training, on the same partition")
    if not gains:
        return Missing(_AGAINST, f"no other run has the same data and partition as {local.label}")
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
        series={one.label: gain[clients] for one, gain in gains},
        styles=tuple(one.style for one, _ in gains),
    )


def against(
    runs: Sequence[NamedRun], finals: Sequence[Final | None]
) -> tuple[NamedRun | None, list[tuple[NamedRun, np.ndarray]]]:
    """The run of local training, and by how many percentage points [N] clients are better in each with the same."""
    known = [(one, end) for one, end in zip(runs, finals, strict=True) if end is not None]
    alone = (each for each in known if _local(each[0].run) and "partition" in each[0].run.config.get("recorded", {}))
    local, base = next(alone, (None, None))
    if local is None or base is None:
        return None, []
    return local, [
        (one, end.accuracy - base.accuracy)
        for one, end in known
        if not _local(one.run) and _same_clients(one.run, local.run)
    ]


def _names(run: Run, clients: np.ndarray) -> list[str]:
    """Clients with their number of training samples, where the run has recorded that."""
    counts = counts_of(run)
    samples = None if counts is None else counts.train.sum(1)
    return [str(client) if samples is None else f"{client} ({samples[client]})" for client in clients.tolist()]


def _local(run: Run) -> bool:
    """Whether the clients have trained alone: nothing was sent in any round."""
    columns = run.columns
    return len(columns["round"]) > 0 and not (columns["up_bytes"].any() or columns["down_bytes"].any())


def _same_clients(run: Run, other: Run) -> bool:
    return all(
        run.config.get("recorded", {}).get(key) == other.config["recorded"].get(key) for key in ("data", "partition")
    )


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
