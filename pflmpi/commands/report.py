"""Make a page with figures over runs, or the table of a sweep."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from pflmpi import arguments
from pflmpi.errors import CheckpointError, ConfigError, PflmpiError, show
from pflmpi.text import printable

_LEFT_OUT = 1  # exit code: something is missing on the page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    arguments.add_overrides(parser)
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="RUN|TABLE",
        help="folders of runs or of scaling experiments, or one YAML file with a table",
    )
    parser.add_argument(
        "--out",
        type=arguments.folder,
        metavar="DIR",
        help="of runs: folder for the page and its figures (default: report); of a table: folder of its runs "
        "(default: sweeps/NAME)",
    )
    parser.add_argument(
        "--target",
        type=float,
        action="append",
        default=[],
        metavar="SHARE",
        help="of runs: an accuracy such as 0.9, until which rounds, time and bytes are counted; may be given several "
        "times (default: the highest that all runs reach)",
    )
    for kind in ("png", "pdf"):
        parser.add_argument(f"--{kind}", action="store_true", help=f"of runs: every figure also as {kind.upper()}")
    arguments.add_to(parser)
    arguments.add_cells(parser)
    parser.add_argument("--write", type=Path, metavar="DIR", help="folder for the table (default: as --out)")


def run(options: argparse.Namespace) -> int:
    """Write the page over runs or scaling experiments, or print and write a table; return the exit code."""
    from pflmpi.scaling.experiment import FILE

    if scaled := [path for path in options.paths if (path / FILE).is_file()]:
        return _report_scaling(options, scaled)
    if options.to is not None:
        raise ConfigError("--to is for the report of scaling experiments, which `pflmpi scale` makes; leave it out")
    if len(options.paths) > 1 or options.paths[0].is_dir():
        return _report_runs(options)
    if options.target:
        raise ConfigError("--target is for the report of runs; a table file has `target: 0.9` itself; leave it out")
    if options.png or options.pdf:
        raise ConfigError("--png and --pdf are for the report of runs; leave them out")
    return _report_table(options)


def _report_scaling(options: argparse.Namespace, scaled: Sequence[Path]) -> int:
    from pflmpi.commands.progress import bar
    from pflmpi.scaling.page import PAGE, write_page
    from pflmpi.scaling.results import results, write_table

    if others := [path for path in options.paths if path not in scaled]:
        raise ConfigError(f"{scaled[0]} is a scaling experiment, and {others[0]} is not; report them one by one")
    _refuse_for_tables(options, "scaling experiments")
    if options.target:
        raise ConfigError("--target is for the report of runs, not of scaling experiments; leave it out")
    found = [results(path) for path in scaled]
    out = options.out or (scaled[0] if len(scaled) == 1 else Path("report"))
    with bar("report") as update:
        problems = write_page(found, out, options.to, update)
    for one in found:
        write_table(one)
    for problem in problems:
        show(PflmpiError(problem))
    print(printable(out / PAGE))
    return _LEFT_OUT if problems else 0


def _refuse_for_tables(options: argparse.Namespace, what: str) -> None:
    for_tables = {"--seeds": options.seeds, "--only": options.only, "--write": options.write, "-s": options.overrides}
    for name, value in for_tables.items():
        if value:
            raise ConfigError(f"{name} is for the report of a table file, not of {what}; leave it out")


def _report_runs(options: argparse.Namespace) -> int:
    from pflmpi.analysis.page.report import PAGE, write_report
    from pflmpi.analysis.series.target import check_target
    from pflmpi.commands.progress import bar

    _refuse_for_tables(options, "runs")
    for target in options.target:
        check_target("--target", target)
    out = options.out or Path("report")
    with bar("report") as update:
        pictures = [kind for kind in ("png", "pdf") if getattr(options, kind)]
        problems = write_report(options.paths, out, update, options.target, pictures)
    for problem in problems:
        show(CheckpointError(problem))
    print(printable(out / PAGE))
    return _LEFT_OUT if problems else 0


def _report_table(options: argparse.Namespace) -> int:
    """Print the table and write it in three formats; return the exit code."""
    from rich.table import Table

    from pflmpi.analysis import formats
    from pflmpi.analysis.table import entries
    from pflmpi.sweep import table as tables
    from pflmpi.terminal import console

    path = options.paths[0]
    table = tables.load(path)
    out = tables.folder(path, options.out)
    cells = tables.select(tables.cells(table, options.overrides, options.seeds), options.only)
    found = entries(table, cells, out)
    words = arguments.words_of_cells(path, options.out, options)
    commands = [shlex.join(["pflmpi", name, *words]) for name in ("sweep", "report")]
    texts = {
        "md": formats.markdown(table, found, commands),
        "csv": formats.comma_separated(table, found),
        "tex": formats.latex(table, found, commands),
    }
    written = _write(options.write or out, path.stem, texts)
    terminal = console(highlight=False)
    terminal.print(table.title)
    for matrix in formats.printed(table, found):
        shown = Table("", *matrix.columns, title=matrix.caption, title_justify="left", title_style="")
        for row in matrix.rows:
            shown.add_row(*row)
        terminal.print(shown)
    notes = [note for entry in found for note in entry.notes]
    for line in (f"published: {table.source}", *table.notes, *notes):
        terminal.print(line)
    problems = [problem for entry in found for problem in entry.problems]
    for problem in problems:
        show(CheckpointError(problem))
    for file in written:
        print(printable(file))
    return _LEFT_OUT if problems else 0


def _write(folder: Path, stem: str, texts: dict[str, str]) -> list[Path]:
    paths = [folder / f"{stem}.{kind}" for kind in texts]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the table in {folder}: {error.strerror}; choose another --write") from error
    return paths
