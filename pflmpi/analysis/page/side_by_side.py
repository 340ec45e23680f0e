"""Figures of single runs that say more side by side: time, cosines over rounds, numbers of clients such as beta."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pflmpi.analysis.plots import Curves, Matrices, Missing, Multiples, Part, Plot, Stack

_CURVES = ("layer_cosines_over_rounds", "bytes_per_round", "imbalance")

Figures = Sequence[Plot | Missing]


def side_by_side(found: Sequence[tuple[str, Figures]]) -> tuple[list[Multiples], list[list[Plot | Missing]]]:
    """The figures that several runs have and that belong side by side, and what remains of each run.

    Args:
        found: the figures of each run, by its label.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, Part]]] = {}
    for label, figures in found:
        for figure in figures:
            if isinstance(figure, Curves | Stack | Matrices) and _comparable(figure):
                kind = (type(figure), figure.name, figure.title, _unit(figure))
                groups.setdefault(kind, []).append((label, figure))
    several = [parts for parts in groups.values() if len(parts) > 1]
    taken = {id(part) for parts in several for _, part in parts}
    rest = [[figure for figure in figures if id(figure) not in taken] for _, figures in found]
    return [_together(parts) for parts in several], rest


def _comparable(figure: Part) -> bool:
    """Whether a figure has the same axes in every run: a number of each client and round, seconds, cosines."""
    if isinstance(figure, Matrices):
        return figure.column_label == "round" and len(figure.panels) == 1
    return isinstance(figure, Stack) or figure.name in _CURVES


def _unit(figure: Part) -> str:
    return figure.value_label if isinstance(figure, Matrices) else figure.y_label


def _together(parts: Sequence[tuple[str, Part]]) -> Multiples:
    first = parts[0][1]
    styles: dict[str, int] = {}  # one for each label, in all runs
    tops = [part.top for _, part in parts if isinstance(part, Stack)]
    top = max((top or 0.0 for top in tops), default=0.0) if all(tops) else None
    return Multiples(
        name=f"{first.name}_of_runs",
        title=first.title,
        caption=_captions(parts),
        parts=tuple((label, _alike(part, styles, top)) for label, part in parts),
    )


def _alike(part: Part, styles: dict[str, int], top: float | None) -> Part:
    """A figure with the colours of all runs, and what is cut off where that is above all of them."""
    if isinstance(part, Stack):
        return replace(part, top=top)
    if isinstance(part, Matrices):
        return part
    curves = tuple(replace(curve, style=styles.setdefault(curve.label, len(styles))) for curve in part.curves)
    return replace(part, curves=curves)


def _captions(parts: Sequence[tuple[str, Part]]) -> str:
    """The sentences that all captions have, and then those of single runs with their labels."""
    each = {label: [f"{text}." for text in part.caption.removesuffix(".").split(". ")] for label, part in parts}
    first, *others = each.values()
    common = [sentence for sentence in first if all(sentence in other for other in others)]
    own = {label: [one for one in sentences if one not in common] for label, sentences in each.items()}
    return " ".join([*common, *(f"{label}: {' '.join(texts)}" for label, texts in own.items() if texts)])
