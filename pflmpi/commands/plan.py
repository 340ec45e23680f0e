"""Predict memory, bytes, disk and seconds of a run before it is submitted.

pflmpi plan configs/quickstart.yaml --ranks 9 --nodes 2
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflmpi import arguments, machine
from pflmpi.errors import ConfigError
from pflmpi.text import format_bytes, format_ranges

if TYPE_CHECKING:
    from rich.table import Table

    from pflmpi.forecast.forecast import Forecast, Resources
    from pflmpi.forecast.memory import RankMemory

_DOES_NOT_FIT = 1
_GIB = 2.0**30
_MOST_RANKS = 10_000
_ALIKE = 0.05  # relative difference of memory up to which ranks share a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser)
    parser.add_argument("--ranks", type=int, default=1, metavar="R", help="ranks to plan for (default: 1)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes they are spread over (default: 1)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of each node (default: 0)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of a node (default: this one's)")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU (default: this machine's)")
    parser.add_argument(
        "--delay", type=float, metavar="MS", help="milliseconds of a message between nodes, one way; with --rate"
    )
    parser.add_argument(
        "--rate", type=float, metavar="MBIT", help="megabits per second between nodes (default: messages take no time)"
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    began = time.perf_counter()

    from pflmpi.config.load import load
    from pflmpi.experiment import privacy
    from pflmpi.forecast import advice
    from pflmpi.forecast.forecast import predict
    from pflmpi.terminal import console, print_json

    resources = _resources(options)
    config, imports = load(options.config, options.overrides), time.perf_counter() - began
    forecast = predict(config, resources)
    problems = advice.find_problems(forecast, Path("runs"))
    notes = [
        *advice.find_useless_ranks(forecast),
        forecast.ranks.remark,
        *forecast.measured.remarks,
        *_assumptions(forecast),
        privacy.statement(forecast.experiment),
    ]
    notes = [note for note in notes if note]
    if options.json:
        print_json({"fits": not problems, "problems": problems, "notes": notes, **_predicted(forecast, imports)})
        return _DOES_NOT_FIT if problems else 0
    terminal = console()
    terminal.print(_ranks_table(forecast))
    terminal.print(_run_table(forecast, imports))
    for problem in problems:
        terminal.print(f"will not fit: {problem}", highlight=False, soft_wrap=True)
    for note in notes:
        terminal.print(f"note: {note}", highlight=False, soft_wrap=True)
    return _DOES_NOT_FIT if problems else 0


def _resources(options: argparse.Namespace) -> "Resources":
    """The machines to plan for, from the options; raise `ConfigError` if those are impossible."""
    from pflmpi.forecast.forecast import Resources
    from pflmpi.transports.detect import detect

    launch = detect(os.environ)
    if launch.size > 1:
        raise ConfigError(
            f"plan runs alone, and {launch.kind} has started {launch.size} ranks; start it without a launcher, "
            f"with --ranks {launch.size}"
        )
    arguments.check_least(options, ranks=1, nodes=1, gpus=0)
    if options.ranks > _MOST_RANKS:
        raise ConfigError(f"--ranks {options.ranks}: a forecast is for at most {_MOST_RANKS}")
    for name in ("memory", "gpu_memory", "rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be greater than 0")
    if options.gpu_memory is not None and not options.gpus:
        raise ConfigError(
            f"--gpu-memory {options.gpu_memory:g} without GPUs to plan for; give --gpus N, those of a node"
        )
    if options.delay is not None and not 0 <= options.delay < float("inf"):
        raise ConfigError(f"--delay {options.delay:g}: must be at least 0")
    gpu_memory = next((gpu.memory for gpu in machine.gpus(None)), None)
    if options.gpu_memory is not None:
        gpu_memory = int(options.gpu_memory * _GIB)
    return Resources(
        ranks=options.ranks,
        nodes=options.nodes,
        gpus=options.gpus,
        cores=len(machine.cores()),
        memory=machine.memory().total if options.memory is None else int(options.memory * _GIB),
        gpu_memory=gpu_memory,
        delay=None if options.delay is None else options.delay / 1e3,
        rate=None if options.rate is None else options.rate * 1e6 / 8,
    )


def _predicted(forecast: "Forecast", imports: float) -> dict[str, Any]:
    """The forecast for JSON; `imports` as in `_run_table`."""
    from pflmpi.forecast import advice

    resources, disk, seconds = forecast.resources, forecast.disk, forecast.seconds
    rounds = forecast.experiment.config.training.rounds
    moved = {way: (logical, wire) for way, logical, wire in forecast.bytes_per_round()}
    return {
        "ranks": [_rank(forecast, rank) for rank in range(resources.ranks)],
        "node_bytes": max(advice.node_bytes(forecast, node) for node in range(resources.nodes)),
        "node_memory_bytes": resources.memory,
        "gpu_bytes": max(advice.gpu_bytes(forecast).values(), default=None),
        "gpu_memory_bytes": forecast.gpu_memory,
        "rounds": rounds,
        **{f"{way}_bytes": logical for way, (logical, _) in moved.items()},
        **{f"wire_{way}_bytes": wire for way, (_, wire) in moved.items()},
        "checkpoints": disk.count,
        "first_checkpoint_bytes": disk.first,
        "checkpoint_bytes": disk.later,
        "disk_peak_bytes": disk.most,
        "disk_final_bytes": disk.last,
        "state_on_disk_bytes": forecast.state_on_disk,
        "start_up_seconds": forecast.start_up(imports),
        "train_seconds": seconds and seconds.train,
        "messages_seconds": seconds and seconds.messages,
        "test_seconds": seconds and seconds.test,
        "round_seconds": seconds and seconds.round,
        "total_seconds": seconds and seconds.round * rounds,
        "measured_on": forecast.measured.device or None,
    }


def _rank(forecast: "Forecast", rank: int) -> dict[str, Any]:
    memory = forecast.memory[rank]
    return {
        "rank": rank,
        "node": forecast.ranks.node[rank],
        "gpu": forecast.ranks.gpu[rank],
        "clients": memory.clients,
        "program_bytes": memory.base,
        "data_bytes": memory.data,
        "state_bytes": memory.state,
        "work_bytes": memory.work,
        "checkpoint_bytes": memory.checkpoint,
        "total_bytes": memory.total,
        "gpu_bytes": memory.device or None,
        "nccl_bytes": memory.nccl,
    }


def _ranks_table(forecast: "Forecast") -> "Table":
    """A line for each group of consecutive ranks that need about the same memory."""
    from rich.table import Table

    on_gpu = any(number is not None for number in forecast.ranks.gpu)
    table = Table(title="memory per rank", title_style="")
    names = ("clients kept", "program", "data", "state", "work", "checkpoint", "total", *(["GPU"] if on_gpu else []))
    for name in ("ranks", *names):
        table.add_column(name, justify="left" if name == "ranks" else "right")
    for first, last, largest, clients in _groups(forecast.memory):
        columns = (largest.base, largest.data, largest.state, largest.work, largest.checkpoint, largest.total)
        device = [format_bytes(largest.device) if largest.device else "-"] if on_gpu else []
        table.add_row(
            format_ranges(range(first, last + 1)), clients, *(format_bytes(value) for value in columns), *device
        )
    return table


def _run_table(forecast: "Forecast", imports: float) -> "Table":
    """Memory of nodes, bytes and seconds of rounds, checkpoints; `imports` seconds pass before a process reads data."""
    from rich.table import Table

    from pflmpi.forecast import advice

    resources, disk = forecast.resources, forecast.disk
    table = Table(show_header=False)
    node = max(advice.node_bytes(forecast, number) for number in range(resources.nodes))
    table.add_row("a node: needs, has", f"{format_bytes(node)}, {format_bytes(resources.memory)}")
    if on_gpus := advice.gpu_bytes(forecast):
        has = "unknown (--gpu-memory)" if forecast.gpu_memory is None else format_bytes(forecast.gpu_memory)
        table.add_row("a GPU: needs, has", f"{format_bytes(max(on_gpus.values()))}, {has}")
    if forecast.ranks.messages.text:
        table.add_row("large messages", forecast.ranks.messages.text)
    if nccl := max(rank.nccl for rank in forecast.memory):
        table.add_row("of a GPU's memory for NCCL, at most about", format_bytes(nccl))
    for way, logical, wire in forecast.bytes_per_round():
        most = ", at most" if way == "down" and forecast.setup.declared.of_clients else ""
        table.add_row(
            f"{way} per round: as papers count, on the wire{most}", f"{format_bytes(logical)}, {format_bytes(wire)}"
        )
    table.add_row(
        "a checkpoint, about: the first, later ones", f"{format_bytes(disk.first)}, {format_bytes(disk.later)}"
    )
    table.add_row(
        f"{disk.count} checkpoints, at most: at once, at the end",
        f"{format_bytes(disk.most)}, {format_bytes(disk.last)}",
    )
    if forecast.state_on_disk:
        table.add_row("state of clients on disk (runtime.state), at most", format_bytes(forecast.state_on_disk))
    table.add_row("seconds: start-up, about", f"{forecast.start_up(imports):.0f}")
    for name, text in _seconds(forecast):
        table.add_row(name, text)
    return table


def _seconds(forecast: "Forecast") -> Iterator[tuple[str, str]]:
    """Yield the lines of the table with estimated seconds; none if nothing was timed."""
    seconds, training = forecast.seconds, forecast.experiment.config.training
    if seconds is None:
        return
    messages = "not estimated" if seconds.messages is None else f"{seconds.messages:.3f}"
    yield "estimated seconds: train, messages, test", f"{seconds.train:.3f}, {messages}, {seconds.test:.3f}"
    rounds = f"all {training.rounds}" if training.stop is None else f"at most {training.rounds} (training.stop)"
    yield f"estimated seconds: a round, {rounds}", f"{seconds.round:.3f}, {seconds.round * training.rounds:.0f}"
    yield "a few steps were timed on", forecast.measured.device


def _assumptions(forecast: "Forecast") -> Iterator[str]:
    """Yield notes on what the forecast assumes about the network and the transport."""
    if forecast.seconds is not None and forecast.seconds.messages is None:
        yield "seconds of messages are estimated with --delay and --rate, between nodes alone"
    if forecast.transport == "torch" and forecast.ranks.runtime.transport == "auto":
        yield "bytes between ranks are those of torch.distributed; -s runtime.transport=mpi plans for MPI"


def _groups(ranks: "Sequence[RankMemory]") -> "Iterator[tuple[int, int, RankMemory, str]]":
    """Yield the first and last rank of each group, its rank with most memory, and the client counts of its ranks."""
    first = 0
    for rank in range(1, len(ranks) + 1):
        if rank < len(ranks) and rank > 1 and _alike(ranks[first], ranks[rank]):
            continue
        group = ranks[first:rank]
        counts = [rank.clients for rank in group]
        clients = format_ranges(range(min(counts), max(counts) + 1))
        yield first, rank - 1, max(group, key=lambda rank: rank.total), clients
        first = rank


def _alike(first: "RankMemory", second: "RankMemory") -> bool:
    return (
        abs(first.total - second.total) <= _ALIKE * max(first.total, second.total)
        and (first.clients > 0) == (second.clients > 0)
        and abs(first.device - second.device) <= _ALIKE * max(first.device, second.device)
    )
