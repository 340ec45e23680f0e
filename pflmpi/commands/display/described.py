"""Algorithms, datasets, partitions and models in words: on a line, in full, and as the table of docs/algorithms.md."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Algorithm, initial_client
from pflmpi.commands.schema import heading, keys
from pflmpi.experiment.outside_code import named
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.messages.kinds import Centres, Downlink, Uplink
from pflmpi.models import MODELS
from pflmpi.text import size

if TYPE_CHECKING:
    from rich.console import RenderableType

_WORDS = {
    "Sum": "sum",
    "Mean": "mean",
    "Rows": "each",
    "Compared": "compared",
    "Offered": "offered",
    "ClassMeans": "class means",
    "Shared": "shared",
    "Own": "own",
    "OneOf": "one of a few",
    "Chosen": "chosen",
    "Mixed": "mixed",
    "OwnClasses": "of its classes",
}


def summary(found: object) -> str:
    """One line: its own, or that of its docstring."""
    return str(getattr(found, "summary", "")) or (inspect.getdoc(found) or "").partition("\n")[0]


def described(name: str) -> "Iterator[RenderableType]":
    """Yield the parts of a description of everything with a name.

    Raises:
        ConfigError: there is nothing of that name.
    """
    for section, full, found in named(name):
        table = keys(section, full, found)  # first, because it refuses a wrong field
        yield heading(section, full)
        yield summary(found)
        if isinstance(found, type) and issubclass(found, Algorithm):
            yield from _traffic(found)
        about = (inspect.getdoc(getattr(found, "kind", found)) or "") if _documented(found) else ""
        about = about.partition("\n\nArgs:")[0].removeprefix(summary(found)).strip()
        if about:
            yield f"\n{_unwrapped(about)}"
        yield "" if table is None else table


def markdown() -> str:
    """What each algorithm sends, receives and keeps, as its own declarations say."""
    task = _task()
    lines = ["| name | up | down | kept by a client | source |", "|---|---|---|---|---|"]
    for name, kind in ALGORITHMS.items():
        algorithm = kind()
        _, *variants = get_args(get_type_hints(kind).get("variant")) or [None]
        words = f"`{name}`" + (f" (`variant:` {', '.join(f'`{each}`' for each in variants)})" if variants else "")
        ways = [_names(declared) or "-" for declared in (algorithm.uplink(task), algorithm.downlink(task))]
        kept = ", ".join(initial_client(algorithm, task, 0)) or "-"
        lines.append(f"| {' | '.join([words, *ways, kept, kind.paper])} |")
    return "\n".join(lines)


def _traffic(kind: type[Algorithm]) -> Iterator[str]:
    """Yield paper, messages and state of an algorithm; only the paper where a key without default decides the rest."""
    yield f"paper  {kind.paper}"
    if any(
        field.default is field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(kind)
        if field.init
    ):
        return
    task, algorithm = _task(), kind()
    for way, declared in (("up", algorithm.uplink(task)), ("down", algorithm.downlink(task))):
        yield f"{way:<6} {_messages(declared)}"
    yield f"keeps  {', '.join(initial_client(algorithm, task, 0)) or '-'}"
    yield "Bytes: one round of a client that holds 2 of 10 classes, with model cnn on 28x28 images."


def _unwrapped(docstring: str) -> str:
    """A docstring whose paragraphs are lines, for a terminal of any width; what is indented stays as it is."""
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(part if "\n " in f"\n{part}" else part.replace("\n", " ") for part in paragraphs)


def _documented(found: Any) -> bool:
    """Whether its docstring is its own; that of an object such as a dataset is its class's."""
    return isinstance(found, type) or inspect.isfunction(found)


def _task() -> Task:
    return Task(MODELS["cnn"]().bind((1, 28, 28), 10), TrainingConfig(), 20, 0, (0.5,), (0.5,))


def _messages(declared: "Mapping[str, Uplink | Downlink]") -> str:
    if not declared:
        return "-"
    total = sum(message.client_bytes(2) for message in declared.values())
    return f"{size(total)}: {_names(declared)}"


def _names(declared: "Mapping[str, Uplink | Downlink]") -> str:
    sent = {name: message for name, message in declared.items() if not isinstance(message, Centres)}  # the server's
    return ", ".join(f"{name} ({_WORDS[type(message).__name__]})" for name, message in sent.items())
