"""A sweep's table as text: for the terminal, as Markdown, CSV and LaTeX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pflmpi.analysis.table import LAST, Entry, Value, compute_mean_and_std, metric_of
from pflmpi.sweep.table import SweepTable
from pflmpi.text import format_csv, pluralize

MARKS = {"md": "Published figures: ", "csv": "row,column,metric,", "tex": "% pflmpi table "}  # in every such file
_FIGURES = {
    "best": "best round",
    "best20": "best of the last 20 rounds",
    "last": "last round",
    "last10": f"mean of the last {LAST} evaluated rounds, or of all of fewer",
}
_COSTS = ("rounds", "megabytes up and down")
_MARKDOWN = str.maketrans({"|": r"\|", "<": r"\<"})  # would end a cell, or begin an element
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


@dataclass(frozen=True)
class PrintedTable:
    """A table of texts, ready to print."""

    caption: str
    columns: list[str]
    rows: list[list[str]]  # for each row its name and its texts


def format_tables(table: SweepTable, entries: Sequence[Entry]) -> list[PrintedTable]:
    """The tables to print: our values beside the published ones, means of the last ten rounds, costs to the target."""
    metric = metric_of(table.metric)
    unit, is_percent = metric.unit and f", {metric.unit}", metric.unit == "percent"
    figure = _FIGURES[table.figure]
    if table.figure.startswith("best") and any(entry.by_validation for entry in entries):
        figure += " by validation"
    if any(entry.published for entry in entries):
        fit = "; inside the published spread, within a point, or outside" if is_percent else ""
        figure += f" (published, difference{fit})"
    texts = {
        f"{metric.name}, {figure}{unit}": [_format_entry(entry, is_percent) for entry in entries],
        f"{metric.name}, {_FIGURES['last10']}{unit}": [_join_value(entry.last_ten, entry.state) for entry in entries],
    }
    if table.target is not None:
        for name in _COSTS:
            caption = f"{name} to an accuracy of {100 * table.target:g} %, of the seeds that reach it"
            texts[caption] = [_join_value(_average_costs(entry)[name]) or "-" for entry in entries]
    rows = [row for row in table.rows if any(entry.row == row for entry in entries)]
    columns = [column for column in table.columns if any(entry.column == column for entry in entries)]
    tables = []
    for caption, cell_texts in texts.items():
        cells = {(entry.row, entry.column): text for entry, text in zip(entries, cell_texts, strict=True)}
        lines = [[row, *(cells.get((row, column), "-") for column in columns)] for row in rows]
        tables.append(PrintedTable(caption, columns, lines))
    return tables


def list_partitions(entries: Sequence[Entry]) -> list[str]:
    """For each column with finished runs, a line with the hashes of their partitions."""
    by_column: dict[str, dict[str, None]] = {}
    for entry in entries:
        by_column.setdefault(entry.column, {}).update(dict.fromkeys(entry.partitions))
    return [f"partition of {column}: {', '.join(hashes)}" for column, hashes in by_column.items() if hashes]


def list_notes(table: SweepTable, entries: Sequence[Entry]) -> list[str]:
    """The notes of the table file and those of its runs."""
    return [*table.notes, *(note for entry in entries for note in entry.notes)]


def format_markdown(table: SweepTable, entries: Sequence[Entry], commands: Sequence[str]) -> str:
    """The table as Markdown, with its source, notes and the commands that made it."""
    parts = [f"# {table.title}", f"Published figures: {table.source}.", "```\n" + "\n".join(commands) + "\n```"]
    for matrix in format_tables(table, entries):
        rows = [["", *matrix.columns], ["---"] * (1 + len(matrix.columns)), *matrix.rows]
        lines = ["| " + " | ".join(text.translate(_MARKDOWN) for text in row) + " |" for row in rows]
        parts += [f"{matrix.caption}:", "\n".join(lines)]
    partitions = [line.translate(_MARKDOWN) for line in list_partitions(entries)]
    if lines := [*partitions, *list_notes(table, entries)]:  # notes may be Markdown
        parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def format_entries_csv(table: SweepTable, entries: Sequence[Entry]) -> str:
    """All values as CSV, a line for each row and column of the table."""
    lines = [_build_csv_row(table, entry) for entry in entries]
    return format_csv([list(lines[0]), *(list(line.values()) for line in lines)])


def format_latex(table: SweepTable, entries: Sequence[Entry], commands: Sequence[str]) -> str:
    """The table as LaTeX tabulars for the package booktabs."""
    head = (table.title, table.source, *commands, *list_notes(table, entries))
    parts = [f"% {line}" for text in head for line in text.splitlines()]
    for matrix in format_tables(table, entries):
        parts += ["", f"% {matrix.caption}", *format_tabular(["", *matrix.columns], matrix.rows)]
    return "\n".join(parts) + "\n"


def format_tabular(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a LaTeX tabular for the package booktabs; the first column holds names."""
    head, *body = (_format_latex_row(row) for row in [columns, *rows])
    start = [rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}", r"\toprule", head, r"\midrule"]
    return [*start, *body, r"\bottomrule", r"\end{tabular}"]


def _format_latex_row(row: Sequence[str]) -> str:
    """A row of a tabular; a first [ or * would belong to the command before it.

    >>> print(_format_latex_row(["[a]", "1"]))
    {}[a] & 1 \\\\
    """
    line = " & ".join(_escape_latex(text) for text in row) + r" \\"
    return "{}" + line if line.lstrip().startswith(("[", "*")) else line


def rate_difference(difference: float, spread: float | None) -> str:
    """Rates how close a value in percent is to the published one, compared with two decimals.

    Args:
        spread: the published spread; None if there is none.

    >>> rate_difference(-0.14, 0.15), rate_difference(-0.14, None), rate_difference(1.24, 0.2)
    ('inside', 'within a point', 'outside')
    """
    if spread is not None and round(abs(difference), 2) <= spread:
        return "inside"
    return "within a point" if round(abs(difference), 2) <= 1 else "outside"


def _build_csv_row(table: SweepTable, entry: Entry) -> dict[str, str | int]:
    def pair(name: str, spread_name: str, value: Value | None) -> dict[str, str]:
        return dict(zip((name, spread_name), _format_value(value), strict=True))

    costs = {f"{name} to target": _format_value(cost)[0] for name, cost in _average_costs(entry).items()}
    return {
        "row": entry.row,
        "column": entry.column,
        "metric": table.metric or "mean",
        "figure": table.figure + (" by validation" if entry.by_validation else ""),
        **pair("ours", "ours_std", entry.ours),
        **pair("published", "published_spread", entry.published),
        "difference": _format_number(entry.difference, entry.ours.digits if entry.ours else 2),
        "fit": _rate_entry(entry) if metric_of(table.metric).unit == "percent" else "",
        **pair(f"last{LAST}", f"last{LAST}_std", entry.last_ten),
        "std_over_clients": _format_number(entry.over_clients),
        **({} if table.target is None else {**costs, "seeds_at_target": len(entry.costs)}),
        "seeds_finished": entry.finished,
        "seeds": entry.seeds,
        "rounds_done": entry.done,
        "rounds": entry.rounds,
        "state": entry.state or "done",
        "partitions": " ".join(entry.partitions),
    }


def _rate_entry(entry: Entry) -> str:
    if entry.published is None or entry.difference is None:
        return ""
    return rate_difference(entry.difference, entry.published.spread)


def _format_entry(entry: Entry, is_percent: bool) -> str:
    """Our value and the number of seeds; in brackets the published value, the difference, and how close it is.

    >>> rest = dict(last_ten=None, over_clients=None, finished=3, seeds=3, done=30, rounds=30, state="")
    >>> _format_entry(Entry("row", "column", ours=Value(98.634, 0.1), published=Value(98.66), **rest), is_percent=True)
    '98.63 ± 0.10, 3 seeds (98.66, -0.03, within a point)'
    """
    seeds = "" if entry.state or entry.ours is None else pluralize(entry.finished, "seed")
    ours = _join_value(entry.ours, entry.state, seeds)
    if entry.published is None:
        return ours
    difference = "" if entry.difference is None or entry.ours is None else f"{entry.difference:+z.{entry.ours.digits}f}"
    return f"{ours} ({_join_value(entry.published, difference, _rate_entry(entry) if is_percent else '')})"


def _join_value(value: Value | None, *more: str) -> str:
    """Joins a value with its spread, and further texts; empty parts are left out."""
    return ", ".join(filter(None, (" ± ".join(filter(None, _format_value(value))), *more)))


def _format_value(value: Value | None) -> tuple[str, str]:
    """The texts of a value and its spread; "" for what is missing."""
    return (
        ("", "")
        if value is None
        else (_format_number(value.value, value.digits), _format_number(value.spread, value.digits))
    )


def _average_costs(entry: Entry) -> dict[str, Value | None]:
    """Mean costs over the seeds that reach the target, by the names of `_COSTS`."""
    rounds = [float(cost.rounds) for cost in entry.costs]
    megabytes = [(cost.up_bytes + cost.down_bytes) / 1e6 for cost in entry.costs]
    return dict(zip(_COSTS, map(compute_mean_and_std, (rounds, megabytes)), strict=True))


def _format_number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:z.{digits}f}"


def _escape_latex(text: str) -> str:
    """Escapes special characters, and typesets a minus before a number as one."""
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)
