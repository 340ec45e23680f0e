"""Show which client holds what, without running anything."""

import argparse
from pathlib import Path

from pflmpi import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    arguments.add_config(parser)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write it, for `partition: {path: FILE}`")
    arguments.add_force(parser)


def run(options: argparse.Namespace) -> int:
    """Show the partition, and save it if asked; return the exit code."""
    from pflmpi.config.load import load
    from pflmpi.data.federation import save
    from pflmpi.data.picture import picture
    from pflmpi.experiment.build import load_federation
    from pflmpi.terminal import console

    arguments.check_free(options.save, "--save", options.force)
    federation = load_federation(load(options.config, options.overrides))
    terminal = console()
    terminal.print(picture(federation, terminal.width))
    if options.save is not None:
        save(federation, options.save)
        terminal.print(f"saved: partition: {{path: {options.save}}}")
    return 0
