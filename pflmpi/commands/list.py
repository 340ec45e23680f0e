"""What there is to choose from, and every key of a configuration."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from pflmpi.algorithms import ALGORITHMS
from pflmpi.config.load import SECTIONS, fields_model
from pflmpi.data import SOURCES
from pflmpi.data.config import partition_parameters
from pflmpi.data.partitions import PARTITIONS
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.messages.kinds import ClassMeans, Downlink, Mean, Own, OwnClasses, Rows, Shared, Sum, Uplink
from pflmpi.models import MODELS
from pflmpi.text import size


def catalogue() -> Group:
    """Return the algorithms, datasets, partitions and models, one line each."""
    return Group(
        _algorithms(),
        _table("dataset", {name: source.summary for name, source in SOURCES.items()}),
        _table("partition", {name: _first_line(partition) for name, partition in PARTITIONS.items()}),
        _table("model", {name: kind.summary for name, kind in MODELS.items()}),
    )


def schema() -> Group:
    """Return every key: its type and range, its default, what it means."""
    tables = [_keys("seed", [("seed", "int, at least 0", "0", "every random draw follows from it")])]
    for name, kind in SECTIONS.items():
        tables.append(_keys(name, _fields(kind)))
    for name in PARTITIONS:
        rows = [("clients", "int, at least 1", "required", "N (writers: how many of them, all by default)")]
        rows += [(key, *parts) for key, parts in partition_parameters(name).items()]
        tables.append(_keys(f"partition: {{name: {name}}}", rows))
    choices: list[tuple[str, str, type]] = [("model", *item) for item in MODELS.items()]
    choices += [("algorithm", *item) for item in ALGORITHMS.items()]
    for section, name, choice in choices:
        tables.append(_keys(f"{section}: {{name: {name}}}", _fields(fields_model(choice))))
    return Group(*tables)


def _algorithms() -> Table:
    """Return what each algorithm is, what travels, and its bytes for one client, round and direction."""
    task = Task(MODELS["cnn"]().bind((1, 28, 28), 10), TrainingConfig(), 20, 0, (0.5,), (0.5,))
    table = Table(
        "algorithm",
        "what it is",
        "paper",
        "up",
        "down",
        title="algorithm (bytes: model cnn, 28x28 images, 10 classes; one client with 2 of them, one round)",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for name, kind in ALGORITHMS.items():
        algorithm = kind()
        ways = (algorithm.uplink(task), algorithm.downlink(task))
        table.add_row(name, kind.summary, kind.paper, *(_travels(messages) for messages in ways))
    return table


def _travels(messages: Mapping[str, Uplink | Downlink]) -> str:
    if not messages:
        return "-"
    total = sum(message.client_bytes(2) for message in messages.values())
    return f"{size(total)}: " + ", ".join(f"{name} ({_KINDS[type(message)]})" for name, message in messages.items())


_KINDS: dict[type, str] = {
    Sum: "sum",
    Mean: "mean",
    Rows: "each",
    ClassMeans: "class means",
    Shared: "shared",
    Own: "own",
    OwnClasses: "of its classes",
}


def _table(title: str, lines: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in lines.items():
        table.add_row(name, text)
    return table


def _keys(title: str, rows: list[tuple[str, str, str, str]]) -> Table:
    table = Table("key", "type", "default", "meaning", title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _fields(kind: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, field in kind.model_fields.items():
        limits = [str(limit).split("(")[-1].rstrip(")") for limit in field.metadata if type(limit).__name__ in _LIMITS]
        text = ", ".join([_type(field.annotation), *(_limit(limit) for limit in field.metadata if limits)])
        default = "required" if field.is_required() else _default(field.default)
        rows.append((name, text.rstrip(", "), default, field.description or ""))
    return rows


_LIMITS = {"Ge": "at least", "Gt": "above", "Le": "at most", "Lt": "below"}


def _default(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _limit(limit: Any) -> str:
    word = _LIMITS.get(type(limit).__name__)
    return f"{word} {next(iter(dataclasses.asdict(limit).values()))}" if word else ""


def _type(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join("null" if part is type(None) else _type(part) for part in typing.get_args(annotation))
    return getattr(annotation, "__name__", str(annotation))


def _first_line(item: Any) -> str:
    return (item.__doc__ or "").strip().split("\n")[0]
