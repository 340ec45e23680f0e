"""`pflmpi inspect`, `export`, `probe`, `partition`, `report`, `list` and `schema`: they show, and start nothing."""

import argparse
import logging
import traceback
from collections.abc import Callable, Sequence

from rich.console import Console

from pflmpi.commands.launch import report
from pflmpi.errors import PflmpiError


def main(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Show what was asked for; return the exit code."""
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.WARNING, format="pflmpi: %(message)s")
    try:
        code = _SHOW[options.command](options)
    except PflmpiError as error:
        if options.debug:
            traceback.print_exception(error)
        report(error)
        return error.exit_code
    return code or 0


def _inspect(options: argparse.Namespace) -> None:
    from pflmpi.commands.inspect import inspect

    inspect(options)


def _export(options: argparse.Namespace) -> None:
    from pflmpi.commands.export import export

    export(options)


def _probe(options: argparse.Namespace) -> None:
    from pflmpi.commands.probe import probe

    probe(options)


def _partition(options: argparse.Namespace) -> None:
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


def _report(options: argparse.Namespace) -> int:
    from pflmpi.commands.report import show

    return show(options)


def _list(options: argparse.Namespace) -> None:
    from pflmpi.commands.list import catalogue

    Console().print(catalogue())


def _schema(options: argparse.Namespace) -> None:
    from pflmpi.commands.list import schema

    Console().print(schema())


_SHOW: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "inspect": _inspect,
    "export": _export,
    "probe": _probe,
    "partition": _partition,
    "report": _report,
    "list": _list,
    "schema": _schema,
}
