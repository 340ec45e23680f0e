"""Descriptions of the names and sections of a configuration: every key with its type, range and default."""

import dataclasses
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from rich.table import Table

from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Algorithm, initial_client
from pflmpi.analysis.comparable import format_yaml
from pflmpi.config import yaml_file
from pflmpi.config.fields import fields_model, partition_model
from pflmpi.config.load import SECTIONS
from pflmpi.config.sections import nested
from pflmpi.errors import ConfigError
from pflmpi.experiment.outside_code import REGISTRIES, find_named_objects
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.messages.kinds import Downlink, Uplink
from pflmpi.models import MODELS
from pflmpi.text import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = tuple[str, str, str, str]  # key, type and range, default, meaning

_SEED: list[Row] = [("seed", "int, at least 0", "0", "every random draw follows from it")]
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_WORDS = {
    "Sum": "sum",
    "Mean": "mean",
    "Rows": "each",
    "ClassMeans": "class means",
    "Shared": "shared",
    "Own": "own",
    "OwnClasses": "of its classes",
}


def describe_names(section: str | None = None) -> Iterator[str]:
    """Yield a line for each name in one section or in all, below a heading for each section."""
    for registry in REGISTRIES.values() if section is None else [REGISTRIES[section]]:
        yield f"{registry.kind}s"
        for name, registered in registry.items():
            yield f"  {name:<13} {_summary(registered)}"
        yield ""
    yield "`pflmpi list NAME` describes one of them, `pflmpi list SECTION` has the keys of"
    yield f"{', '.join(sections())}."


def catalogue(name: str | None = None) -> dict[str, Any]:
    """Names and sections with their keys: all of them, or those that `pflmpi list NAME` shows.

    Raises:
        ConfigError: there is nothing of that name.
    """
    rows_of = sections()
    entries: Iterable[tuple[str, str, Any]] = ()
    if name is None or name in sections_of_names():
        registries = REGISTRIES if name is None else {name: REGISTRIES[name]}
        entries = ((section, full, value) for section, names in registries.items() for full, value in names.items())
    elif name not in rows_of:
        entries = find_named_objects(name)
    return {
        "names": [
            {
                "section": section,
                "name": full,
                "summary": _summary(registered),
                "paper": getattr(registered, "paper", None),
                "keys": _as_objects(keys(section, full, registered)),
            }
            for section, full, registered in entries
        ],
        "sections": [
            {"name": section, "keys": _as_objects(rows)} for section, rows in rows_of.items() if name in (None, section)
        ],
    }


def _as_objects(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "type": kind,
            "required": default == "required",
            "default": None if default == "required" else yaml_file.parse(default, key),
            "meaning": meaning,
        }
        for key, kind, default, meaning in rows
    ]


def sections() -> dict[str, list[Row]]:
    """The keys of each section that has the same keys for all names."""
    return {"seed": _SEED, **{name: [*_fields(kind)] for name, kind in SECTIONS.items()}}


def sections_of_names() -> list[str]:
    """Sections whose keys depend on the name in them: algorithm, model, partition and others."""
    return [section for section in REGISTRIES if section not in SECTIONS]


def keys(section: str, name: str, registered: Any) -> list[Row]:
    """The keys that a name has in its section."""
    if section == "partition":
        return [*_fields(partition_model(name))]
    return [*_fields(fields_model(registered))] if isinstance(registered, type) else []


def describe(name: str) -> "Iterator[RenderableType]":
    """Yield the parts of a description of a section, or of everything with a name.

    Raises:
        ConfigError: there is nothing of that name.
    """
    if name in sections():
        yield _table(name, sections()[name])
        return
    for section, full, registered in find_named_objects(name):
        rows = keys(section, full, registered)  # first, because it refuses a wrong field
        in_yaml = {
            "transform": f"data: {{transform: [{full}]}}",
            "task": f"data: {{task: {full}}}",
            "measure": f"evaluation: {{measures: [{full}]}}",
            "selection": f"training: {{selection: {full}}}",
        }
        yield in_yaml.get(section, f"{section}: {{name: {full}}}")
        yield _summary(registered)
        if isinstance(registered, type) and issubclass(registered, Algorithm):
            yield from _traffic(registered)
        about = (inspect.getdoc(getattr(registered, "kind", registered)) or "") if _documented(registered) else ""
        about = about.partition("\n\nArgs:")[0].removeprefix(_summary(registered)).strip()
        if about:
            yield f"\n{_unwrapped(about)}"
        yield _table("", rows) if rows else ""


def markdown() -> str:
    """A table of what each algorithm sends, receives and keeps, from its declarations."""
    lines = ["| name | up | down | kept by a client | source |", "|---|---|---|---|---|"]
    for name, kind in ALGORITHMS.items():
        algorithm = kind()
        task = _task(algorithm)
        _, *variants = get_args(get_type_hints(kind).get("variant")) or [None]
        words = f"`{name}`" + (f" (`variant:` {', '.join(f'`{variant}`' for variant in variants)})" if variants else "")
        ways = [_names(declared) or "-" for declared in (algorithm.uplink(task), algorithm.downlink(task))]
        kept = ", ".join(initial_client(algorithm, task, 0)) or "-"
        lines.append(f"| {' | '.join([words, *ways, kept, kind.paper])} |")
    return "\n".join(lines)


def _summary(registered: object) -> str:
    return str(getattr(registered, "summary", "")) or (inspect.getdoc(registered) or "").partition("\n")[0]


def _table(title: str, rows: Iterable[Row]) -> Table:
    table = Table("key", "type", "default", "meaning", title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _fields(kind: type[BaseModel], within: str = "") -> Iterator[Row]:
    """Yield the name, type and range, default, and meaning of each field, and of those of a mapping below it."""
    for name, field in kind.model_fields.items():
        limits = [
            f"{word} {limit}"
            for attribute, word in _LIMITS.items()
            for part in field.metadata
            if (limit := getattr(part, attribute, None)) is not None
        ]
        default = "required" if field.is_required() else format_yaml(field.get_default(call_default_factory=True))
        yield within + name, ", ".join([_type(field.annotation), *limits]), default, field.description or ""
        if (below := nested(field.annotation)) is not None:
            yield from _fields(below, f"{within}{name}.")


def _type(annotation: Any) -> str:
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, parts))
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join("null" if part is type(None) else _type(part) for part in parts)
    if nested(annotation) is not None:
        return "mapping"
    if get_origin(annotation) in (tuple, list):
        return "list" if parts[0] is Any else f"list[{_type(parts[0])}]"
    return str(annotation) if parts else getattr(annotation, "__name__", str(annotation))


def _traffic(kind: type[Algorithm]) -> Iterator[str]:
    """Yield paper, messages and state of an algorithm; only the paper if it has a key without a default."""
    yield f"paper  {kind.paper}"
    if any(
        field.default is field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(kind)
        if field.init
    ):
        return
    algorithm = kind()
    task = _task(algorithm)
    for way, declared in (("up", algorithm.uplink(task)), ("down", algorithm.downlink(task))):
        yield f"{way:<6} {_messages(declared)}"
    yield f"keeps  {', '.join(initial_client(algorithm, task, 0)) or '-'}"
    model = task.architecture.name
    yield f"Bytes: one round of a client that holds 2 of 10 classes, with model {model} on 28x28 images."


def _unwrapped(docstring: str) -> str:
    """Join the lines of each paragraph, for a terminal of any width; indented paragraphs stay as they are."""
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(part if "\n " in f"\n{part}" else part.replace("\n", " ") for part in paragraphs)


def _documented(registered: Any) -> bool:
    """Whether an object has a docstring of its own; `inspect.getdoc` of an instance returns its class's."""
    return isinstance(registered, type) or inspect.isfunction(registered)


def _task(algorithm: Algorithm) -> Task:
    """An example task for the description of an algorithm: with the model cnn, or resnet18 if it refuses that."""
    cnn, resnet = (
        Task(MODELS[name]().bind((1, 28, 28), 10), TrainingConfig(), 20, 0, (0.5,), (0.5,))
        for name in ("cnn", "resnet18")
    )
    try:
        algorithm.check(cnn, cnn.num_clients)
    except ConfigError:
        return resnet
    return cnn


def _messages(declared: "Mapping[str, Uplink | Downlink]") -> str:
    """Bytes and names of the messages in one direction."""
    if not declared:
        return "-"
    total = sum(message.client_bytes(2) for message in declared.values())
    return f"{format_bytes(total)}: {_names(declared)}"


def _names(declared: "Mapping[str, Uplink | Downlink]") -> str:
    return ", ".join(f"{name} ({_WORDS[type(message).__name__]})" for name, message in declared.items())
