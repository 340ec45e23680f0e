"""The command line. Only the parser is here; each command imports what it needs, so that `--help` is quick."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from pflmpi import __version__

_COMMANDS = {
    "run": "run an experiment",
    "resume": "continue a run from its newest good checkpoint",
    "inspect": "show what a run holds, check it, print its digest",
    "partition": "show who holds what, without running anything",
    "sweep": "run the cells of a table that are not done yet",
    "report": "print and write the table of a sweep",
    "list": "list algorithms, datasets, partitions and models",
    "schema": "print every key of a configuration: type, range, default",
}
_MODULES = {"run": "running", "resume": "running", "sweep": "sweeping"}  # the rest is shown


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="pflmpi",
        description="Personalised federated learning on clusters: alone, or under mpirun, torchrun or srun.",
        epilog="exit codes: 0 done, 1 a run of a sweep failed, 2 wrong input (nothing was started), "
        "3 a fault during the run (continue it)",
    )
    top.add_argument("--version", action="version", version=f"pflmpi {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = {name: commands.add_parser(name, help=text, description=text) for name, text in _COMMANDS.items()}

    for name in ("run", "resume", "partition", "sweep", "report"):
        made[name].add_argument(
            "-s",
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            dest="overrides",
            help="override section.key",
        )
    for name in ("run", "partition"):
        made[name].add_argument("config", type=Path, help="a YAML file (see `pflmpi schema`)")
    for name in ("resume", "inspect"):
        made[name].add_argument("run", type=Path, help="the folder of a run")
    made["run"].add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME-TIME)")
    for name in ("run", "resume"):
        made[name].add_argument(
            "--ranks",
            type=int,
            metavar="N",
            help="processes to start when started alone (default: one per GPU, or per core; 1 stays in this process)",
        )
        shown = made[name].add_mutually_exclusive_group()
        shown.add_argument("--quiet", action="store_true", help="no progress, only the result")
        shown.add_argument("--bar", action="store_true", help="a progress bar also where mpirun hides the terminal")
    made["inspect"].add_argument("--digest", action="store_true", help="print the SHA-256 over server and clients")
    made["inspect"].add_argument(
        "--round", type=int, metavar="N", help="the checkpoint to look at (default: the newest)"
    )
    _add_table_options(made["sweep"], made["report"])
    made["partition"].add_argument("--save", type=Path, metavar="FILE", help="write it, for `partition: {path: FILE}`")
    for command in made.values():
        command.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    return top


def _add_table_options(sweep: argparse.ArgumentParser, report: argparse.ArgumentParser) -> None:
    for command in (sweep, report):
        command.add_argument("table", type=Path, help="a YAML file with rows, columns and seeds")
        command.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default: sweeps/NAME)")
        command.add_argument("--seeds", type=int, metavar="N", help="only the first N seeds of the table")
        command.add_argument(
            "--only", action="append", default=[], metavar="PATTERN", help="only cells whose ROW/COLUMN is like this"
        )
    sweep.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    sweep.add_argument(
        "--ranks", type=int, metavar="N", help="processes of each run (default: cores or GPUs, shared among the jobs)"
    )
    sweep.add_argument("--dry-run", action="store_true", help="show what would be done, and start nothing")
    report.add_argument("--write", type=Path, metavar="DIR", help="folder for the table (default: as --out)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    module = import_module(f"pflmpi.commands.{_MODULES.get(options.command, 'showing')}")
    code: int = module.main(options, given)
    return code
