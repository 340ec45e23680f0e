"""Figures over one or several scaling experiments."""

from collections.abc import Callable, Sequence

import numpy as np

from pflmpi.analysis.plots import Curve, Curves, Missing, Plot, Stack
from pflmpi.scaling.results import PARTS, Point, Results
from pflmpi.text import counted, scaled_bytes

_WIDE = 8  # times the first number of ranks: from here on the axis is logarithmic
_PLAN = "predicted by plan"


def figures(among: dict[str, Results]) -> list[Plot | Missing]:
    """All figures, each over all experiments by name, but for the parts of a round: a figure for each."""
    splits = [
        _split(name, found, "" if len(among) == 1 else f"_{number}")
        for number, (name, found) in enumerate(among.items(), 1)
    ]
    return [_seconds(among), _speed_up(among), _efficiency(among), *splits, _memory(among), _bytes(among)]


def _seconds(among: dict[str, Results]) -> Curves:
    curves = []
    for style, (name, found) in enumerate(among.items()):
        points = found.measured
        low, high = np.array([point.spread for point in points]).T
        seconds = np.array([point.seconds for point in points])
        curves.append(
            Curve(_named(among, name, "measured"), _ranks(points), seconds, low, high, style=style, source=name)
        )
        curves += _predicted(among, name, "seconds", 1.0, style)
    return _over_ranks(
        among,
        curves,
        "seconds_per_round",
        "Seconds per round",
        "Median over repeats of the median round; the band is between the quartiles of all rounds. Dotted: what "
        "`pflmpi plan` predicted.",
        "seconds per round",
    )


def _speed_up(among: dict[str, Results]) -> Curves:
    caption = (
        "Over the smallest number of ranks, in work per second; the band is what the quartiles of the rounds give."
    )
    return _relative(among, "speed_up", "Speed-up", f"{caption} Dotted: the ideal.", Results.speed_up, Results.ideal)


def _efficiency(among: dict[str, Results]) -> Curves:
    caption = "Speed-up, of the ideal one."
    return _relative(among, "efficiency", "Efficiency", caption, Results.efficiency, lambda *_: 1.0)


def _relative(
    among: dict[str, Results],
    name: str,
    title: str,
    caption: str,
    value: Callable[[Results, Point], float],
    ideal: Callable[[Results, Point], float],
) -> Curves:
    curves: list[Curve] = []
    for style, (label, found) in enumerate(among.items()):
        points = found.measured
        middle = np.array([value(found, point) for point in points])
        low, high = np.array([(point.seconds / point.spread[1], point.seconds / point.spread[0]) for point in points]).T
        curves.append(Curve(label, _ranks(points), middle, middle * low, middle * high, style=style, source=label))
        best = np.array([ideal(found, point) for point in points])
        curves.append(Curve("ideal", _ranks(points), best, style=7, thin=True, source=label))
    return _over_ranks(among, curves, name, title, caption, title.lower())


def _split(name: str, found: Results, ending: str) -> Stack:
    points = found.measured
    return Stack(
        name=f"split{ending}",
        title=f"Where the seconds go{f': {name}' if ending else ''}",
        caption="Means over all rounds that count. Compute (local training), evaluation and waiting for the slowest "
        "rank are means over the ranks that compute; checkpoint is the time for which training stopped for one; "
        "exchange is the rest: messages, the server's update, reports of the ranks.",
        x_label="",
        y_label="seconds per round",
        x=np.arange(len(points), dtype=np.float64),
        names=tuple(counted(point.ranks, "rank") for point in points),
        parts={part: np.array([point.parts[part] for point in points]) for part in PARTS},
    )


def _memory(among: dict[str, Results]) -> Curves | Missing:
    kinds = {"memory_rank_bytes": "largest rank", "memory_bytes": "all ranks"}
    most = [point.most("memory_bytes") for found in among.values() for point in found.measured]
    if np.isnan(most).any():
        return Missing("Memory", "the system does not say")
    divisor, unit = scaled_bytes(max(most))
    curves: list[Curve] = []
    for number, (name, found) in enumerate(among.items()):
        points = found.measured
        for place, (column, kind) in enumerate(kinds.items()):
            style, values = 2 * number + place, np.array([point.most(column) for point in points])
            curves.append(Curve(_named(among, name, kind), _ranks(points), values / divisor, style=style, source=name))
            curves += _predicted(among, name, column, divisor, style)
    caption = "The most that processes had resident at any time. Dotted: what `pflmpi plan` predicted."
    return _over_ranks(among, curves, "memory", "Memory", caption, f"memory ({unit})")


def _bytes(among: dict[str, Results]) -> Curves | Missing:
    most = max(point.wire_bytes for found in among.values() for point in found.measured)
    if not most:
        return Missing("Bytes between ranks", "one rank sends nothing")
    divisor, unit = scaled_bytes(most)
    curves: list[Curve] = []
    for style, (name, found) in enumerate(among.items()):
        values = np.array([point.wire_bytes for point in found.measured]) / divisor
        curves.append(Curve(_named(among, name, "measured"), _ranks(found.measured), values, style=style, source=name))
        curves += _predicted(among, name, "wire_bytes", divisor, style)
    caption = "What all ranks together sent each other in a round. Dotted: what `pflmpi plan` predicted."
    return _over_ranks(among, curves, "bytes", "Bytes between ranks", caption, f"sent in a round ({unit})")


def _predicted(among: dict[str, Results], name: str, key: str, divisor: float, style: int) -> list[Curve]:
    """The predicted values of an experiment; none where nothing was predicted."""
    points = [point for point in among[name].points if key in point.plan]
    values = np.array([point.plan[key] for point in points]) / divisor
    label = _named(among, name, _PLAN)
    return [Curve(label, _ranks(points), values, style=style, thin=True, source=name)] if points else []


def _over_ranks(
    among: dict[str, Results],
    curves: Sequence[Curve],
    name: str,
    title: str,
    caption: str,
    y_label: str,
) -> Curves:
    ticks = sorted({point.ranks for found in among.values() for point in found.points})
    return Curves(
        name=name,
        title=title,
        caption=caption,
        x_label="ranks",
        y_label=y_label,
        curves=tuple(curves),
        x_log=ticks[-1] >= _WIDE * ticks[0],
        x_ticks=tuple(ticks),
        zero=True,
    )


def _ranks(points: Sequence[Point]) -> np.ndarray:
    return np.array([point.ranks for point in points], np.float64)


def _named(among: dict[str, Results], name: str, what: str) -> str:
    """What is shown, with its experiment where there are several."""
    return what if len(among) == 1 else f"{name}, {what}"
