"""Show which client holds what, without running anything."""

import argparse
from pathlib import Path

from pflmpi.commands import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    arguments.add_config(parser)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write it, for `partition: {path: FILE}`")


def run(options: argparse.Namespace) -> int:
    """Show the partition, and save it if asked; return the exit code."""
    from rich.console import Console

    from pflmpi.config.load import load
    from pflmpi.data.federation import save
    from pflmpi.data.picture import picture
    from pflmpi.run.build import load_federation

    federation = load_federation(load(options.config, options.overrides))
    console = Console()
    console.print(picture(federation, console.width))
    if options.save is not None:
        save(federation, options.save)
        console.print(f"saved: partition: {{path: {options.save}}}")
    return 0
