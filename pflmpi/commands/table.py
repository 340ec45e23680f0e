"""Print the table of a sweep beside the published figures, and write it as Markdown, CSV and LaTeX.

pflmpi table configs/papers/digits.yaml --only 'FedGMH/*'
"""

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path

from pflmpi import arguments, atomic
from pflmpi.errors import CheckpointError, show
from pflmpi.text import printable

_LEFT_OUT = 1  # exit code: something is missing in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_overrides(parser)
    parser.add_argument("table", type=Path, metavar="TABLE", help="a YAML file with a table")
    arguments.add_out(parser, "folder of its runs (default: sweeps/NAME)")
    arguments.add_cells(parser)
    write = "folder for the table (default: that of its runs; a part of it is only printed)"
    parser.add_argument("--write", type=Path, metavar="DIR", help=write)


def run(options: argparse.Namespace) -> int:
    from rich.table import Table

    from pflmpi.analysis.table import compute_entries, fill_in_metric
    from pflmpi.analysis.table_text import (
        format_entries_csv,
        format_latex,
        format_markdown,
        format_tables,
        list_notes,
        list_partitions,
    )
    from pflmpi.sweep import table as tables
    from pflmpi.terminal import console

    table = tables.load(options.table)
    out = tables.find_sweep_folder(options.table, options.out)
    cells = tables.select_cells(tables.list_cells(table, options.overrides, options.seeds), options.only)
    table = fill_in_metric(table, cells, out)
    measured = compute_entries(table, cells, out)
    words = arguments.words_of_cells(options.table, options.out, options)
    commands = [shlex.join(["pflmpi", name, *words]) for name in ("sweep", "table")]
    texts = {
        "md": format_markdown(table, measured, commands),
        "csv": format_entries_csv(table, measured),
        "tex": format_latex(table, measured, commands),
    }
    is_whole = len(cells) == len(tables.list_cells(table, options.overrides, None))
    files = _write(options.write or out, options.table.stem, texts) if is_whole or options.write else []
    terminal = console(highlight=False)
    terminal.print(table.title)
    for matrix in format_tables(table, measured):
        grid = Table("", *matrix.columns, title=matrix.caption, title_justify="left", title_style="")
        for row in matrix.rows:
            grid.add_row(*row)
        terminal.print(grid)
    for line in (f"published: {table.source}", *list_partitions(measured), *list_notes(table, measured)):
        terminal.print(line)
    problems = [problem for entry in measured for problem in entry.problems]
    for problem in problems:
        show(CheckpointError(problem))
    lines = [*map(printable, files)] or ["a part of the table, which is not written; --write DIR writes it"]
    print("\n".join(lines))
    return _LEFT_OUT if problems else 0


def _write(folder: Path, stem: str, texts: Mapping[str, str]) -> list[Path]:
    """Write a file for each text, by suffix; return their paths."""
    from pflmpi.analysis.table_text import MARKS

    paths = [folder / f"{stem}.{kind}" for kind in texts]
    with atomic.explain_write_error(f"the table in {folder}", "choose another --write"):
        folder.mkdir(parents=True, exist_ok=True)
        for path, kind in zip(paths, texts, strict=True):
            atomic.read_earlier(path, MARKS[kind], "choose another --write")
        for path, text in zip(paths, texts.values(), strict=True):
            atomic.write(path, text.encode())
    return paths
