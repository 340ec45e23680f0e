"""List algorithms, datasets, partitions and models, or every key of one or of a section.

pflmpi list
pflmpi list training
pflmpi list fedgmh
pflmpi list ./net.py:Net
"""

import argparse

from pflmpi import arguments
from pflmpi.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", help="describe this one: a name, ./my_file.py:Class, or a section such as training or model"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="only the algorithms, as the table of docs/algorithms.md"
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    from pflmpi.commands.described import catalogue, describe, describe_names, markdown, sections_of_names
    from pflmpi.terminal import console, print_json

    if options.json and options.markdown:
        raise ConfigError("--markdown and --json are two shapes of the output; give one of them")
    if options.json:
        print_json(catalogue(options.name))
        return 0
    if options.markdown:
        print(markdown())
        return 0
    terminal = console()
    if options.name is None or options.name in sections_of_names():
        for line in describe_names(options.name):
            terminal.print(line, no_wrap=True, overflow="ellipsis")
        return 0
    for part in describe(options.name):
        terminal.print(part, no_wrap=False, overflow="ellipsis")
    return 0
