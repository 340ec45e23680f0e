"""Figures of cost: bytes and seconds of rounds, and the main measure against them."""

from collections.abc import Mapping, Sequence

import numpy as np

from pflmpi.analysis.metrics import compute_mean, find_best_round
from pflmpi.analysis.plots import Curve, Curves, Missing, Stack
from pflmpi.analysis.selection import NamedRun, SeedGroup
from pflmpi.analysis.series.accuracy import choose_measure, format_mean_label, format_title, mask_evaluated
from pflmpi.learning.main_measure import MainMeasure
from pflmpi.text import join_truncated, scaled_bytes

_HIGH = 4  # times the 90th percentile of the rounds' seconds; higher rounds are cut off in the drawing
_PARTS = {  # label -> column of metrics.csv
    "communication": "exchange_seconds",
    "evaluation": "evaluation_seconds",
    "checkpoint": "checkpoint_seconds",
}
_Totals = list[tuple[NamedRun, np.ndarray]]  # runs with their cumulative bytes or seconds, [rounds]
_BYTES = {"up": "up_bytes", "down": "down_bytes", "up, wire": "wire_up_bytes", "down, wire": "wire_down_bytes"}


def plot_against_bytes(runs: Sequence[NamedRun]) -> Curves | Missing:
    """The main measure against the logical bytes sent so far, up and down."""
    measure = choose_measure(runs)
    totals: _Totals = []
    without_traffic = []
    for named_run in runs:
        total = np.cumsum(named_run.run.columns["up_bytes"] + named_run.run.columns["down_bytes"])
        if not total.any():
            without_traffic.append(named_run.label)
        elif mask_evaluated(named_run, measure.column).any():
            totals.append((named_run, total))
    totals, lost = _drop_lost(totals)
    if not totals:
        return Missing(
            f"{format_title(measure)} against bytes",
            "nothing was sent by these runs, no round has been evaluated yet, or metrics of rounds are lost",
        )
    divisor, unit = scaled_bytes(max(float(total[-1]) for _, total in totals))
    caption = "What the messages hold, of all clients from the first round on." + lost
    if without_traffic:
        caption += f" Not drawn, as nothing is sent: {join_truncated(without_traffic, 5)}."
    x_label = f"sent so far, up and down ({unit})"
    scaled = [(named_run, total / divisor) for named_run, total in totals]
    return _plot_against(measure, "bytes", caption, x_label, scaled)


def plot_against_seconds(runs: Sequence[NamedRun]) -> Curves | Missing:
    """The main measure against the seconds of the rounds so far."""
    measure = choose_measure(runs)
    totals, lost = _drop_lost(
        [
            (named_run, np.cumsum(named_run.run.columns["seconds"]))
            for named_run in runs
            if mask_evaluated(named_run, measure.column).any()
        ]
    )
    if not totals:
        return Missing(
            f"{format_title(measure)} against time", "no round has been evaluated yet, or metrics of rounds are lost"
        )
    caption = "Seconds of the rounds on rank 0. Only times from the same machine and number of ranks can be compared."
    return _plot_against(measure, "seconds", caption + lost, "time in rounds (s)", totals)


def _drop_lost(totals: _Totals) -> tuple[_Totals, str]:
    """Drops runs with rounds whose metrics are lost; the others, and a sentence for the caption."""
    lost = [named_run.label for named_run, total in totals if np.isnan(total).any()]
    known = [(named_run, total) for named_run, total in totals if not np.isnan(total).any()]
    return known, f" Not drawn, as metrics of rounds are lost: {join_truncated(lost, 5)}." if lost else ""


def _plot_against(measure: MainMeasure, cost: str, caption: str, x_label: str, totals: _Totals) -> Curves:
    """A measure against the total cost of each run, in "bytes" or "seconds"."""
    curves = []
    for named_run, total in totals:
        columns, evaluated = named_run.run.columns, mask_evaluated(named_run, measure.column)
        curves.append(
            Curve(
                named_run.legend,
                x=total[evaluated],
                y=measure.scale * columns[measure.column][evaluated],
                mark=find_best_round(columns, evaluated, measure),
                style=named_run.style,
                source=named_run.label,
                rounds=columns["round"][evaluated],
            )
        )
    ends = [float(total[-1]) for _, total in totals]
    return Curves(
        name=f"{measure.name}_against_{cost}",
        title=f"{format_title(measure)} against {'time' if cost == 'seconds' else cost}",
        caption=caption,
        x_label=x_label,
        y_label=format_mean_label(measure),
        curves=tuple(curves),
        x_log=max(ends) > 10 * min(ends),
        percent=measure.percent,
    )


Columns = Mapping[str, np.ndarray]  # columns of metrics.csv, each [rounds]


def average_columns(group: SeedGroup) -> Columns:
    """The columns of metrics.csv, averaged over seeds for the rounds that all of them have."""
    if len(group.runs) == 1:
        return group.runs[0].run.columns
    seeds = [named_run.run.columns for named_run in group.runs]
    count = min(len(columns["round"]) for columns in seeds)
    names = [name for name in seeds[0] if all(name in columns for columns in seeds)]
    return {name: compute_mean([columns[name][:count] for columns in seeds]) for name in names}


def plot_rounds(columns: Columns, label: str) -> list[Curves | Stack | Missing]:
    """Bytes, seconds and load balance of each round."""
    return [plot_bytes(columns, label), plot_seconds(columns), *plot_imbalance(columns)]


def plot_bytes(columns: Columns, label: str) -> Curves | Missing:
    """Bytes up and down in each round, logical and wire."""
    title = "Bytes per round"
    sent = {label: columns[name] for label, name in _BYTES.items() if np.nan_to_num(columns[name]).any()}
    if not sent:
        return Missing(title, f"{label} sends nothing, or its metrics are lost")
    divisor, unit = scaled_bytes(max(float(np.nanmax(values)) for values in sent.values()))
    return Curves(
        name="bytes_per_round",
        title=title,
        caption="Up to the server, down from it: what the messages hold. Wire: what was moved between ranks.",
        y_label=f"sent in a round ({unit})",
        curves=tuple(
            Curve(label, columns["round"], values / divisor, style=style)
            for style, (label, values) in enumerate(sent.items())
        ),
        zero=True,
    )


def plot_seconds(columns: Columns) -> Stack | Missing:
    """Seconds of each round on rank 0, split into parts that add up to the round."""
    title = "Time per round"
    if not len(columns["round"]):
        return Missing(title, "no round is complete yet")
    parts = {label: np.nan_to_num(columns[name]) for label, name in _PARTS.items() if name in columns}
    rest = columns["seconds"] - np.sum(list(parts.values()), axis=0)
    parts = {"computation, and the rest of the round": np.maximum(rest, 0.0), **parts}
    total = np.sum(list(parts.values()), axis=0)
    usual = float(np.quantile(total, 0.9))
    high = total > _HIGH * usual
    cut = [f"{number:g} ({seconds:.1f} s)" for number, seconds in zip(columns["round"][high], total[high], strict=True)]
    return Stack(
        name="seconds_per_round",
        title=title,
        caption="On rank 0. Communication has the wait for other ranks; checkpoint: while training stopped for one."
        + (f" Cut off at the top: round {', '.join(cut)}." if cut else ""),
        x_label="round",
        y_label="time (s)",
        x=columns["round"],
        parts=parts,
        top=1.5 * usual if cut else None,
    )


def plot_imbalance(columns: Columns) -> list[Curves]:
    """Seconds that the slowest rank computes in each round, and the mean over ranks; empty if ranks never wait."""
    waiting = np.nan_to_num(columns.get("waiting_seconds", np.zeros(0)))
    if not waiting.any():
        return []
    rounds, slowest = columns["round"], columns["compute_seconds"]
    ratio = np.nansum(slowest) / np.nansum(slowest - waiting)  # NaN in rounds whose metrics are lost
    return [
        Curves(
            name="imbalance",
            title="Balance of ranks",
            caption=f"Training and testing. In all rounds together the slowest rank has {ratio:.2f} times the mean.",
            y_label="time (s)",
            curves=(Curve("slowest rank", rounds, slowest), Curve("mean", rounds, slowest - waiting, style=1)),
            zero=True,
        )
    ]
