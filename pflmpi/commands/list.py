"""List algorithms, datasets, partitions and models, or describe one."""

import argparse
from collections.abc import Iterator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("name", nargs="?", help="describe this one: a name, or ./my_file.py:Class")
    parser.add_argument(
        "--markdown", action="store_true", help="only the algorithms, as the table of docs/algorithms.md"
    )


def run(options: argparse.Namespace) -> int:
    """Print a line for each algorithm, dataset, partition and model, or all about one; return the exit code."""
    from pflmpi.commands.display.described import described, markdown
    from pflmpi.terminal import console

    if options.markdown:
        print(markdown())
        return 0
    terminal = console()
    for line in _overview() if options.name is None else described(options.name):
        terminal.print(line, no_wrap=isinstance(line, str) and options.name is None, overflow="ellipsis")
    return 0


def _overview() -> Iterator[str]:
    """Yield a line for each name, below what it is a name of."""
    from pflmpi.commands.display.described import summary
    from pflmpi.experiment.outside_code import REGISTRIES

    for registry in REGISTRIES.values():
        yield f"{registry.kind}s"
        for name, found in registry.items():
            yield f"  {name:<13} {summary(found)}"
        yield ""
    yield "`pflmpi list NAME` describes one of them."
