"""List algorithms, datasets, partitions and models."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args, get_type_hints

from pflmpi.text import size

if TYPE_CHECKING:
    from rich.table import Table

    from pflmpi.learning.task import Task
    from pflmpi.messages.kinds import Downlink, Uplink

_WORDS = {
    "Sum": "sum",
    "Mean": "mean",
    "Rows": "each",
    "ClassMeans": "class means",
    "Shared": "shared",
    "Own": "own",
    "OwnClasses": "of its classes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--markdown", action="store_true", help="only the algorithms, as the table of docs/algorithms.md"
    )


def run(options: argparse.Namespace) -> int:
    """Print a line for each algorithm, dataset, partition and model; return the exit code."""
    if options.markdown:
        print(_markdown())
        return 0
    from pflmpi.data import SOURCES
    from pflmpi.data.partitions import PARTITIONS
    from pflmpi.models import MODELS
    from pflmpi.terminal import console

    partitions = {name: _summary(rule) for name, rule in PARTITIONS.items()}
    terminal = console()
    terminal.print(_algorithms())
    terminal.print(_table("dataset", {name: _summary(source) for name, source in SOURCES.items()}))
    terminal.print(_table("partition", partitions))
    terminal.print(_table("model", {name: kind.summary for name, kind in MODELS.items()}))
    return 0


def _summary(one: object) -> str:
    """One line for a list: its own, or that of its docstring."""
    return str(getattr(one, "summary", "")) or (one.__doc__ or "").strip().split("\n")[0]


def _algorithms() -> "Table":
    """What each algorithm is, what travels, and its bytes for one client, round and direction."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from pflmpi.algorithms import ALGORITHMS

    task = _task()
    title = "algorithm (bytes: model cnn, 28x28 images, 10 classes; one client with 2 of them, one round)"
    columns = ("algorithm", "what it is", "paper", "up", "down")
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD)
    for name, kind in ALGORITHMS.items():
        algorithm = kind()
        ways = (algorithm.uplink(task), algorithm.downlink(task))
        table.add_row(name, kind.summary, kind.paper, *(_messages(declared) for declared in ways))
    return table


def _markdown() -> str:
    """What each algorithm sends, receives and keeps, as its own declarations say."""
    from pflmpi.algorithms import ALGORITHMS

    task = _task()
    lines = ["| name | up | down | kept by a client | source |", "|---|---|---|---|---|"]
    for name, kind in ALGORITHMS.items():
        algorithm = kind()
        _, *variants = get_args(get_type_hints(kind).get("variant")) or [None]
        words = f"`{name}`" + (f" (`variant:` {', '.join(f'`{each}`' for each in variants)})" if variants else "")
        ways = [_names(declared) or "-" for declared in (algorithm.uplink(task), algorithm.downlink(task))]
        kept = ", ".join(algorithm.init_client(task, 0)) or "-"
        lines.append(f"| {' | '.join([words, *ways, kept, kind.paper])} |")
    return "\n".join(lines)


def _task() -> "Task":
    from pflmpi.learning.task import Task
    from pflmpi.learning.training import TrainingConfig
    from pflmpi.models import MODELS

    return Task(MODELS["cnn"]().bind((1, 28, 28), 10), TrainingConfig(), 20, 0, (0.5,), (0.5,))


def _messages(declared: "Mapping[str, Uplink | Downlink]") -> str:
    if not declared:
        return "-"
    total = sum(message.client_bytes(2) for message in declared.values())
    return f"{size(total)}: {_names(declared)}"


def _names(declared: "Mapping[str, Uplink | Downlink]") -> str:
    return ", ".join(f"{name} ({_WORDS[type(message).__name__]})" for name, message in declared.items())


def _table(title: str, lines: Mapping[str, str]) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in lines.items():
        table.add_row(name, text)
    return table
