"""Runs that differ in the seed alone, as one curve: their mean, with its confidence interval as a band."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from pflmpi.analysis.comparable import NOT_COMPARED
from pflmpi.analysis.plots import Curve, Curves, Missing
from pflmpi.analysis.run import Run
from pflmpi.analysis.series.selection import NamedRun

_CONFIDENCE = 0.95


def merged(plot: Curves | Missing, runs: Sequence[NamedRun]) -> Curves | Missing:
    """A figure with one curve for each group of runs that differ in the seed alone, where there are any."""
    groups = [group for group in _groups(runs) if len(group) > 1]
    if isinstance(plot, Missing):
        return plot
    curves = list(plot.curves)
    names = Counter(group[0].run.name for group in groups)
    for group in groups:
        labels = {one.label for one in group}
        theirs = [curve for curve in curves if curve.source in labels]
        if len(theirs) < 2 or (count := _common(theirs, plot.by_round)) is None:
            continue
        name = group[0].run.name if names[group[0].run.name] == 1 else group[0].label
        one = _mean(f"{name}, {len(theirs)} seeds", theirs, count, plot.percent)
        curves = [one if curve is theirs[0] else curve for curve in curves if curve not in theirs[1:]]
    if len(curves) == len(plot.curves):
        return plot
    band = f"with its {100 * _CONFIDENCE:.0f} % confidence interval (Student's t) as a band"
    caption = f"{plot.caption} Runs that differ in the seed alone are one curve: their mean, {band}."
    return replace(plot, curves=tuple(curves), caption=caption)


def _groups(runs: Sequence[NamedRun]) -> list[list[NamedRun]]:
    found: dict[str, list[NamedRun]] = {}
    for one in runs:
        found.setdefault(_without_seed(one.run), []).append(one)
    return list(found.values())


def _without_seed(run: Run) -> str:
    kept = {section: values for section, values in run.config.items() if section not in ("seed", *NOT_COMPARED)}
    return json.dumps(kept, sort_keys=True, default=str)


def _common(curves: Sequence[Curve], over_rounds: bool) -> int | None:
    """Number of points that all curves have; None where these do not belong together."""
    lengths = [len(curve.x) for curve in curves]
    count = min(lengths)
    if not count or (max(lengths) > count and curves[0].points is not None):
        return None
    same = all(np.array_equal(curve.x[:count], curves[0].x[:count]) for curve in curves)
    return count if same or not over_rounds else None


def _mean(label: str, curves: Sequence[Curve], count: int, percent: bool) -> Curve:
    """Mean of curves point by point, with the confidence interval of the mean; none where a value is infinite."""
    x, y = (np.array([getattr(curve, axis)[:count] for curve in curves]) for axis in "xy")
    special: Any = import_module("scipy.special")
    spread = np.where(np.isfinite(y), y, np.nan).std(0, ddof=1)
    half = special.stdtrit(len(curves) - 1, (1 + _CONFIDENCE) / 2) * spread / len(curves) ** 0.5
    mean = y.mean(0)
    least, most = 0.0 if (y >= 0).all() else -np.inf, 100.0 if percent else np.inf
    low, high = (np.clip(side, least, most) for side in (mean - half, mean + half))
    mark = None if curves[0].mark is None else int(mean.argmax())
    return replace(curves[0], label=label, x=x.mean(0), y=mean, low=low, high=high, mark=mark, points=None)
