"""`pflmpi report`: a page over runs, or the table of a sweep, printed and written."""

import argparse
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pflmpi.analysis import formats
from pflmpi.analysis.table import entries
from pflmpi.commands.run_report import run_report
from pflmpi.errors import ConfigError
from pflmpi.sweep import cells as listing
from pflmpi.sweep import table as tables


def command(name: str, options: argparse.Namespace) -> str:
    """Return the line that gives a command the same table and runs as the options of `sweep` or `report`."""
    words = [name, str(options.table)]
    words += [] if options.out is None else ["--out", str(options.out)]
    words += [] if options.seeds is None else ["--seeds", str(options.seeds)]
    words += [word for pattern in options.only for word in ("--only", pattern)]
    words += [word for text in options.overrides for word in ("-s", text)]
    return shlex.join(["pflmpi", *words])


def show(options: argparse.Namespace) -> int:
    """Write the page over the runs that are named, or print and write the table; return the exit code."""
    if len(options.paths) > 1 or options.paths[0].is_dir():
        _refuse_table_options(options)
        return run_report(options.paths, options.out or Path("report"))
    options.table = options.paths[0]
    _show_table(options)
    return 0


def _refuse_table_options(options: argparse.Namespace) -> None:
    given = {"--seeds": options.seeds, "--only": options.only, "--write": options.write, "-s": options.overrides}
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} is for the report of a table file, not of runs; leave it out")


def _show_table(options: argparse.Namespace) -> None:
    """Print the table and write it."""
    table = tables.load(options.table)
    out = listing.folder(options.table, options.out)
    cells = listing.select(listing.cells(table, options.overrides, options.seeds), options.only)
    found = entries(table, cells, out)
    commands = [command(name, options) for name in ("sweep", "report")]
    texts = {
        "md": formats.markdown(table, found, commands),
        "csv": formats.comma_separated(table, found),
        "tex": formats.latex(table, found, commands),
    }
    paths = _write(options.write or out, options.table.stem, texts)
    console = Console(markup=False, highlight=False)
    console.print(table.title)
    for matrix in formats.matrices(table, found):
        shown = Table("", *matrix.columns, title=matrix.caption, title_justify="left", title_style="")
        for row in matrix.rows:
            shown.add_row(*row)
        console.print(shown)
    for line in (f"published: {table.source}", *table.notes):
        console.print(line)
    for path in paths:
        print(path)


def _write(folder: Path, stem: str, texts: dict[str, str]) -> list[Path]:
    paths = [folder / f"{stem}.{kind}" for kind in texts]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the table in {folder}: {error.strerror}; choose another --write") from error
    return paths
