"""A table as Markdown, CSV and LaTeX."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pflmpi.analysis.table import LAST, METRICS, Entry, Value, over_seeds
from pflmpi.sweep.table import SweepTable
from pflmpi.text import counted, spreadsheet_safe

_FIGURES = {"best": "best round", "last": "last round", "last10": f"mean of the last {LAST} evaluated rounds"}
_COSTS = ("rounds", "megabytes up and down")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


@dataclass(frozen=True)
class PrintedTable:
    """A table of texts, ready to be printed.

    Attributes:
        rows: the name of each and its texts.
    """

    caption: str
    columns: list[str]
    rows: list[list[str]]


def printed(table: SweepTable, entries: Sequence[Entry]) -> list[PrintedTable]:
    """The table as the paper prints it, beside the published figures, and the mean of the last ten rounds."""
    metric = METRICS[table.metric]
    unit, points = metric.unit and f", {metric.unit}", metric.unit == "percent"

    fit = "; inside the published spread, within a point, or outside" if points else ""

    def beside(entry: Entry) -> str:
        return _beside(entry, points)

    to = f"to an accuracy of {100 * (table.target or 0):g} %, of the seeds that reach it"
    costs = [
        _printed(f"{name} {to}", table, entries, lambda entry, name=name: _text(_costs(entry)[name]) or "-")  # type: ignore[misc]
        for name in (_COSTS if table.target is not None else ())
    ]
    return [
        _printed(f"{metric.name}, {_FIGURES[table.figure]} (published, difference{fit}){unit}", table, entries, beside),
        _printed(
            f"{metric.name}, {_FIGURES['last10']}{unit}", table, entries, lambda entry: _shown(entry, entry.last_ten)
        ),
        *costs,
    ]


def markdown(table: SweepTable, entries: Sequence[Entry], commands: Sequence[str]) -> str:
    """The table with its source, notes and the commands that made it."""
    parts = [f"# {table.title}", f"Published figures: {table.source}.", "```\n" + "\n".join(commands) + "\n```"]
    for matrix in printed(table, entries):
        rows = [["", *matrix.columns], ["---"] * (1 + len(matrix.columns)), *matrix.rows]
        lines = ["| " + " | ".join(text.replace("|", r"\|") for text in row) + " |" for row in rows]
        parts += [f"{matrix.caption}:", "\n".join(lines)]
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    return "\n\n".join(parts) + "\n"


def comma_separated(table: SweepTable, entries: Sequence[Entry]) -> str:
    """Everything that is known, one line for each row and column of the table."""
    lines = [_everything(table, entry) for entry in entries]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: spreadsheet_safe(str(value)) for key, value in line.items()} for line in lines)
    return file.getvalue()


def latex(table: SweepTable, entries: Sequence[Entry], commands: Sequence[str]) -> str:
    """The table as tabulars for the package booktabs."""
    parts = [f"% {line}" for text in (table.title, table.source, *commands, *table.notes) for line in text.splitlines()]
    for matrix in printed(table, entries):
        parts += ["", f"% {matrix.caption}", *tabular(["", *matrix.columns], matrix.rows)]
    return "\n".join(parts) + "\n"


def tabular(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a LaTeX tabular for the package booktabs; the first column holds names."""
    head, *body = (" & ".join(_escaped(text) for text in row) + r" \\" for row in [columns, *rows])
    start = [rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}", r"\toprule", head, r"\midrule"]
    return [*start, *body, r"\bottomrule", r"\end{tabular}"]


def _everything(table: SweepTable, entry: Entry) -> dict[str, str | int]:
    ours, published, last = (_pair(figure) for figure in (entry.ours, entry.published, entry.last_ten))
    return {
        "row": entry.row,
        "column": entry.column,
        "metric": table.metric,
        "figure": table.figure,
        "ours": ours[0],
        "ours_std": ours[1],
        "published": published[0],
        "published_spread": published[1],
        "difference": _number(entry.difference),
        "fit": _fit(entry) if METRICS[table.metric].unit == "percent" else "",
        f"last{LAST}": last[0],
        f"last{LAST}_std": last[1],
        "std_over_clients": _number(entry.over_clients),
        **{f"{name} to target": _pair(cost)[0] for name, cost in _costs(entry).items() if table.target is not None},
        **({} if table.target is None else {"seeds_at_target": len(entry.costs)}),
        "seeds_finished": entry.finished,
        "seeds": entry.seeds,
        "rounds_done": entry.done,
        "rounds": entry.rounds,
        "state": entry.state or "done",
    }


def _printed(caption: str, table: SweepTable, entries: Sequence[Entry], text: Callable[[Entry], str]) -> PrintedTable:
    texts = {(entry.row, entry.column): text(entry) for entry in entries}
    rows = [row for row in table.rows if any(entry.row == row for entry in entries)]
    columns = [column for column in table.columns if any(entry.column == column for entry in entries)]
    return PrintedTable(
        caption, columns, [[row, *(texts.get((row, column), "-") for column in columns)] for row in rows]
    )


def closeness(difference: float, spread: float | None) -> str:
    """How near a figure in percent is to the published one, to two decimals.

    Args:
        spread: published, around the figure; None where there is none.

    >>> closeness(-0.14, 0.15), closeness(-0.14, None), closeness(1.24, 0.2)
    ('inside', 'within a point', 'outside')
    """
    if spread is not None and round(abs(difference), 2) <= spread:
        return "inside"
    return "within a point" if round(abs(difference), 2) <= 1 else "outside"


def _fit(entry: Entry) -> str:
    if entry.published is None or entry.difference is None:
        return ""
    return closeness(entry.difference, entry.published.spread)


def _beside(entry: Entry, points: bool) -> str:
    """Our figure and the seeds behind it; in brackets the published one, the difference, and how near that is.

    >>> figures = dict(last_ten=None, over_clients=None, finished=3, seeds=3, done=30, rounds=30, state="")
    >>> _beside(Entry("row", "column", ours=Value(98.634, 0.1), published=Value(98.66), **figures), points=True)
    '98.63 ± 0.10, 3 seeds (98.66, -0.03, within a point)'
    """
    seeds = "" if entry.state or entry.ours is None else counted(entry.finished, "seed")
    ours = ", ".join(filter(None, (_shown(entry, entry.ours), seeds)))
    if entry.published is None:
        return ours
    difference = "" if entry.difference is None else f"{entry.difference:+z.2f}"
    known = filter(None, (_text(entry.published), difference, _fit(entry) if points else ""))
    return f"{ours} ({', '.join(known)})"


def _shown(entry: Entry, figure: Value | None) -> str:
    return ", ".join(text for text in (_text(figure), entry.state) if text)


def _text(figure: Value | None) -> str:
    return " ± ".join(filter(None, _pair(figure)))


def _costs(entry: Entry) -> dict[str, Value | None]:
    """Over the seeds that reach the target, by the names of `_COSTS`."""
    rounds = [float(cost.rounds) for cost in entry.costs]
    megabytes = [(cost.up_bytes + cost.down_bytes) / 1e6 for cost in entry.costs]
    return dict(zip(_COSTS, map(over_seeds, (rounds, megabytes)), strict=True))


def _pair(figure: Value | None) -> tuple[str, str]:
    return (_number(figure.value), _number(figure.spread)) if figure else ("", "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:z.2f}"


def _escaped(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)
