"""Print every key of a configuration, or of one algorithm, model, dataset or partition: type, range, default."""

import argparse
import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.table import Table

_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

Row = tuple[str, str, str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("name", nargs="?", help="only this one: a name in a configuration, such as ./my_file.py:Class")


def run(options: argparse.Namespace) -> int:
    """Print a table for each section, and for each choice within a section; return the exit code."""
    from pflmpi.experiment.outside_code import named
    from pflmpi.terminal import console

    terminal = console()
    if options.name is None:
        for title, rows in _sections():
            terminal.print(_table(title, rows))
        return 0
    for section, full, found in named(options.name):
        terminal.print(_table(heading(section, full), _keys(section, full, found)))
    return 0


def keys(section: str, name: str, found: Any) -> "Table | None":
    """The table of the keys beside a name in a section; None if there are none."""
    rows = list(_keys(section, name, found))
    return _table("", rows) if rows else None


def _sections() -> Iterator[tuple[str, Iterable[Row]]]:
    """Yield the title and the keys of each section."""
    from pflmpi.algorithms import ALGORITHMS
    from pflmpi.config.load import SECTIONS
    from pflmpi.data.partitions import PARTITIONS
    from pflmpi.experiment.outside_code import named
    from pflmpi.models import MODELS

    yield "seed", [("seed", "int, at least 0", "0", "every random draw follows from it")]
    for name, kind in SECTIONS.items():
        yield name, _fields(kind)
    for choices in (PARTITIONS, MODELS, ALGORITHMS):
        for name in choices:
            for section, full, found in named(name):
                yield heading(section, full), _keys(section, full, found)


def heading(section: str, name: str) -> str:
    if section == "transform":
        return f"data: {{transform: [{name}]}}"
    return f"{section}: {{name: {name}}}"


def _keys(section: str, name: str, found: Any) -> Iterable[Row]:
    """The keys of an object that was found by its name."""
    from pflmpi.config.fields import fields_model, partition_model

    if section == "partition":
        return _fields(partition_model(name))
    return _fields(fields_model(found)) if isinstance(found, type) else ()


def _table(title: str, rows: Iterable[Row]) -> "Table":
    from rich.table import Table

    table = Table("key", "type", "default", "meaning", title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _fields(kind: "type[BaseModel]", within: str = "") -> Iterator[Row]:
    """Yield the name, type and range, default, and meaning of each field, and of those of a mapping below it."""
    from pflmpi.config.sections import nested

    for name, field in kind.model_fields.items():
        limits = [
            f"{word} {limit}"
            for attribute, word in _LIMITS.items()
            for part in field.metadata
            if (limit := getattr(part, attribute, None)) is not None
        ]
        default = "required" if field.is_required() else _value(field.get_default(call_default_factory=True))
        yield within + name, ", ".join([_type(field.annotation), *limits]), default, field.description or ""
        if (below := nested(field.annotation)) is not None:
            yield from _fields(below, f"{within}{name}.")


def _value(value: object) -> str:
    """A value as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _type(annotation: Any) -> str:
    from pflmpi.config.sections import nested

    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, parts))
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join("null" if part is type(None) else _type(part) for part in parts)
    if nested(annotation) is not None:
        return "mapping"
    return str(annotation) if parts else getattr(annotation, "__name__", str(annotation))
