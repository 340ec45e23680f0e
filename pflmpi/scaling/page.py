"""The page of scaling experiments: tables, figures, hardware and versions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pflmpi import atomic
from pflmpi.analysis.drawing import html
from pflmpi.analysis.drawing.html import FIGURES, PageTable, Section, draw_figures
from pflmpi.analysis.drawing.rendering import PICTURES
from pflmpi.analysis.plots import Curve, Curves, Missing, Plot, Stack
from pflmpi.analysis.table_text import format_tabular
from pflmpi.errors import CheckpointError
from pflmpi.scaling.experiment import WARM_UP
from pflmpi.scaling.extrapolation import plot_extrapolations
from pflmpi.scaling.records import hardware
from pflmpi.scaling.results import PARTS, TITLES, Point, Results, format_table
from pflmpi.text import pluralize, scaled_bytes

_WIDE = 8  # if the largest number of ranks is this many times the smallest, the axis is logarithmic


def plot_figures(named: Mapping[str, Results]) -> list[Plot | Missing]:
    """All figures; each shows all experiments by name, except the parts of a round, which have one for each."""
    parts = [_plot_parts(results, name, len(named) > 1) for name, results in named.items()]
    return [_plot_seconds(named), _plot_speed_up(named), *parts, _plot_memory(named), _plot_bytes(named)]


def _plot_seconds(named: Mapping[str, Results]) -> Curves:
    curves = []
    for curve, results in zip(
        _make_curves(named, {"measured": lambda point: point.seconds}), named.values(), strict=True
    ):
        low, high = np.array([point.spread for point in results.measured]).T
        curves.append(replace(curve, low=low, high=high))
    caption = "Median over repeats of the median round; the band is between the quartiles of all rounds."
    return _plot_over_ranks(named, curves, "scaling_seconds", "Seconds per round", caption, "seconds per round")


def _plot_speed_up(named: Mapping[str, Results]) -> Curves:
    curves: list[Curve] = []
    for style, (name, results) in enumerate(named.items()):
        points, ranks = results.measured, _rank_counts(results)
        speed_up = np.array([results.speed_up(point) for point in points])
        ideal = np.array([results.ideal(point) for point in points])
        low, high = np.array([(point.seconds / point.spread[1], point.seconds / point.spread[0]) for point in points]).T
        curves.append(Curve(name, ranks, speed_up, speed_up * low, speed_up * high, style=style, source=name))
        curves.append(Curve("ideal", ranks, ideal, style=7, thin=True, source=name))
    caption = (
        "Over the smallest number of ranks, in work per second; the band is what the quartiles of the rounds give. "
        "Dotted: the ideal."
    )
    return _plot_over_ranks(named, curves, "speed_up", "Speed-up", caption, "speed-up")


def _plot_parts(results: Results, name: str, several: bool) -> Stack:
    points = results.measured
    return Stack(
        name="split",
        title=f"Where the seconds go{f': {name}' if several else ''}",
        caption="Means over all rounds that count. Compute (local training), evaluation and waiting for the slowest "
        "rank are means over the ranks that compute; checkpoint is the time for which training stopped for one; "
        "exchange is the rest: messages, the server's update, reports of the ranks.",
        x_label="",
        y_label="seconds per round",
        x=np.arange(len(points), dtype=np.float64),
        names=tuple(pluralize(point.ranks, "rank") for point in points),
        parts={part: np.array([point.parts[part] for point in points]) for part in PARTS},
    )


def _plot_memory(named: Mapping[str, Results]) -> Curves | Missing:
    values: dict[str, Callable[[Point], float]] = {
        "largest rank": lambda point: point.most("memory_rank_bytes"),
        "all ranks": lambda point: point.most("memory_bytes"),
    }
    most = [point.most("memory_bytes") for results in named.values() for point in results.measured]
    if np.isnan(most).any():
        return Missing("Memory", "the system does not say")
    divisor, unit = scaled_bytes(max(most))
    caption = "The most that processes had resident at any time."
    return _plot_over_ranks(
        named, _make_curves(named, values, divisor), "memory", "Memory", caption, f"memory ({unit})"
    )


def _plot_bytes(named: Mapping[str, Results]) -> Curves | Missing:
    title, caption = "Bytes between ranks", "What all ranks together sent each other in a round."
    most = max(point.wire_bytes for results in named.values() for point in results.measured)
    if not most:
        return Missing(title, "one rank sends nothing")
    divisor, unit = scaled_bytes(most)
    curves = _make_curves(named, {"measured": lambda point: point.wire_bytes}, divisor)
    return _plot_over_ranks(named, curves, "bytes", title, caption, f"sent in a round ({unit})")


def _make_curves(
    named: Mapping[str, Results], values: Mapping[str, Callable[[Point], float]], divisor: float = 1.0
) -> list[Curve]:
    """A curve over ranks for each experiment and each of the `values`, which are functions of a point by label."""
    curves: list[Curve] = []
    for name, results in named.items():
        for label, value in values.items():
            y = np.array([value(point) for point in results.measured]) / divisor
            legend = label if len(named) == 1 else f"{name}, {label}"
            curves.append(Curve(legend, _rank_counts(results), y, style=len(curves), source=name))
    return curves


def _plot_over_ranks(
    named: Mapping[str, Results], curves: Sequence[Curve], name: str, title: str, caption: str, y_label: str
) -> Curves:
    ticks = sorted({point.ranks for results in named.values() for point in results.points})
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


def _rank_counts(results: Results) -> np.ndarray:
    return np.array([point.ranks for point in results.measured], np.float64)


PAGE, _LATEX_TABLE = "scale.html", "scale.tex"


def write_page(
    experiments: Sequence[Results],
    out: Path,
    to: int | None,
    update: Callable[[int, int], None] = lambda *_: None,
    made: str = "",
) -> list[str]:
    """Writes the page with its figures and its LaTeX table into a folder; returns problems, one line each.

    Args:
        to: number of ranks up to which Amdahl's law is extrapolated; None for no extrapolation.

    Raises:
        CheckpointError: an experiment has no measured run.
        ConfigError: the folder cannot be written, or has such files that are not known to be from pflmpi; or the law
            cannot be fitted.
    """
    named = _name_experiments(experiments)
    for results in experiments:
        if not results.measured:
            raise CheckpointError(
                f"nothing was measured in {results.out} yet{''.join(f'; {why}' for why in results.problems)}"
            )
    extrapolations = [] if to is None else plot_extrapolations(named, to)
    problems = [f"{name}: {problem}" for name, results in named.items() for problem in results.problems]
    with atomic.explain_write_error(f"the page in {out}", "choose another --out"):
        earlier = html.read_earlier_page(out / PAGE, _LATEX_TABLE, r"\begin{tabular}")
        drawn = draw_figures(out, PICTURES, [*plot_figures(named), *extrapolations], FIGURES, update)
        tables = [_build_section(name, results) for name, results in named.items()]
        title = f"Scaling of {next(iter(named))}" if len(named) == 1 else f"Scaling: {', '.join(named)}"
        about = "Rounds of one configuration on several numbers of ranks; the first round of each run is left out."
        sections = [
            *tables,
            Section("All figures", figures=drawn),
            Section("Where it was measured", table=_build_hardware_table(named)),
        ]
        latex = [
            line
            for name, results in named.items()
            for line in (*(f"% {text}" for text in (name, *results.notes)), *format_tabular(*format_table(results)), "")
        ]
        atomic.write(out / _LATEX_TABLE, "\n".join(latex).encode())
        html.finish_page(out / PAGE, html.build_page(title, about, problems, sections, made), earlier)
    return problems


def _name_experiments(experiments: Sequence[Results]) -> dict[str, Results]:
    """The experiments by the names of their folders, or by their paths if these names are not unique."""
    names = [results.out.resolve().name for results in experiments]
    if len(set(names)) < len(names):
        names = [str(results.out) for results in experiments]
    return dict(zip(names, experiments, strict=True))


def _build_section(name: str, results: Results) -> Section:
    columns, rows = format_table(results)
    wrong = [
        number for number, point in enumerate(results.points) if not point.same_bits or any(point.problems.values())
    ]
    scaling = results.scaling
    parts = [scaling.config[section].get("name", "") for section in ("algorithm", "data")]
    text = (
        f"{scaling.mode}: {TITLES[scaling.mode]}; {' on '.join(parts)}; {scaling.repeats} runs each, medians of "
        f"{scaling.rounds - WARM_UP} rounds, quartiles of those of all runs; seconds per round and bytes. A point with "
        f"other bits, or a run that failed, stands out.{''.join(f' {note}.' for note in results.notes)}"
    )
    return Section(name, text, table=PageTable(columns, rows, wrong=wrong))


def _build_hardware_table(named: dict[str, Results]) -> PageTable:
    """Where the runs were measured, and with which versions: a line for each combination."""
    columns = ["experiment", "ranks", "hardware", "nodes", "device", "driver", "transport", "pflmpi", "commit", "torch"]
    columns += ["numpy", "mpi4py"]
    rows: dict[tuple[str, ...], list[int]] = {}
    for name, results in named.items():
        for point in results.measured:
            for run in point.runs:
                record = run.record
                key = (name, hardware(record), *(str(record.get(column, "")) for column in columns[3:]))
                rows.setdefault(key, []).append(point.ranks)
    lines = [[key[0], ", ".join(str(rank) for rank in dict.fromkeys(ranks)), *key[1:]] for key, ranks in rows.items()]
    return PageTable(columns, lines, names=3)
