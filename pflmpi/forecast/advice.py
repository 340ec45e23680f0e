"""What will not fit, what to change, and which ranks would be of no use."""

import shutil
from collections.abc import Callable
from pathlib import Path

from pflmpi import text
from pflmpi.forecast.forecast import Forecast
from pflmpi.forecast.memory import RankMemory

Size = Callable[[float], str]


def problems(forecast: Forecast, folder: Path, size: Size) -> list[str]:
    """Return what will not fit, each with what to change.

    Args:
        folder: where the run would be, or the first folder above it that is there.
        size: bytes as text.
    """
    return [*_nodes(forecast, size), *_gpus(forecast, size), *_disk(forecast, folder, size)]


def node_bytes(forecast: Forecast, node: int) -> float:
    """Return the bytes that the ranks of a node need; what they share counts once."""
    ranks = [forecast.memory[rank] for rank in forecast.ranks.of_node(node)]
    return sum(rank.total - rank.shared for rank in ranks) + max(rank.shared for rank in ranks)


def gpu_bytes(forecast: Forecast) -> dict[tuple[int, int], float]:
    """Return the bytes that the ranks of each GPU need, by node and number."""
    needed: dict[tuple[int, int], float] = {}
    for rank, number in enumerate(forecast.ranks.gpu):
        if number is not None:
            where = forecast.ranks.node[rank], number
            needed[where] = needed.get(where, 0.0) + forecast.memory[rank].device
    return needed


def useless(forecast: Forecast) -> list[str]:
    """Return which ranks would have nothing to do, or would wait for others, and why."""
    ready, count = forecast.ready, forecast.ranks.count
    n, cores, threads = ready.task.num_clients, forecast.question.cores, forecast.ranks.runtime.threads
    busy = [rank for rank in range(count) if any(one.training[rank] or one.testing[rank] for one in forecast.ahead)]
    idle = [rank for rank in range(1, count) if rank not in busy]
    found = []
    if idle and forecast.ahead:
        groups = len(ready.placement.groups)
        reason = "no client is left for them; take fewer ranks"
        if groups < min(n, len(ready.placement.hosts)):
            reason = (
                f"the {n} clients are computed in {groups} calls of up to {forecast.experiment.config.runtime.lanes}; "
                "set runtime.lanes lower, or take fewer ranks"
            )
        elif count > n + 1:
            reason = f"there are {n} clients: at most {n + 1} ranks are of use"
        found.append(f"{text.ranks(idle)} will have nothing to do: {reason}")
    training = max((sum(bool(groups) for groups in one.training) for one in forecast.ahead), default=0)
    able = len(busy)
    if training and 2 * training <= able:
        found.append(
            f"{able} ranks have clients, and at most {training} of them train in a round "
            f"({len(forecast.ahead[0].participants)} participants); fewer ranks would be as quick"
        )
    for node in range(forecast.question.nodes):
        on_cpu = [rank for rank in forecast.ranks.of_node(node) if rank in busy and forecast.ranks.gpu[rank] is None]
        if len(on_cpu) * threads > cores:
            each = "1 thread" if threads == 1 else f"{threads} threads"
            found.append(
                f"{len(on_cpu)} ranks with {each} each compute on the {cores} cores of a node and take turns; "
                "take fewer ranks per node" + (", or set runtime.threads lower" if threads > 1 else "")
            )
            break
    return found


def _nodes(forecast: Forecast, size: Size) -> list[str]:
    needs = [node_bytes(forecast, node) for node in range(forecast.question.nodes)]
    largest = max(range(len(needs)), key=needs.__getitem__)
    if needs[largest] <= forecast.question.memory:
        return []
    ranks = [forecast.memory[rank] for rank in forecast.ranks.of_node(largest)]
    return [
        f"node {largest} needs {size(needs[largest])} of memory and has {size(forecast.question.memory)}: "
        f"{_less_memory(forecast, ranks, largest == 0)}"
    ]


def _less_memory(forecast: Forecast, ranks: list[RankMemory], with_server: bool) -> str:
    """Return what to change for less memory on a node: its largest part decides."""
    config = forecast.experiment.config
    parts = {name: sum(getattr(rank, name) for rank in ranks) for name in ("base", "state", "work", "data")}
    parts["state"] += sum(rank.checkpoint for rank in ranks)
    largest = max(parts, key=parts.__getitem__)
    if largest == "state":
        if with_server and forecast.sizes.server_bytes > parts["state"] / 4:
            return "most of it is the server's state; give rank 0 a node with more memory"
        kept = " or set evaluation.absent = 'latest', which keeps no replies" if _keeps_replies(forecast) else ""
        return f"most of it is the state of the clients that live there; take more nodes{kept}"
    if largest == "work":
        lanes = f"runtime.lanes (now {config.runtime.lanes}), " if config.runtime.executor == "lanes" else ""
        return (
            f"most of it is for computing; lower {lanes}training.batch_size (now {config.training.batch_size}) or "
            f"evaluation.batch_size (now {config.evaluation.batch_size}), or take fewer ranks per node"
        )
    return "take fewer ranks per node; a rank can compute many clients"


def _keeps_replies(forecast: Forecast) -> bool:
    config = forecast.experiment.config
    return config.evaluation.absent == "last_received" and bool(config.algorithm.predicts_with)


def _gpus(forecast: Forecast, size: Size) -> list[str]:
    needs, there = gpu_bytes(forecast), forecast.gpu_memory
    if not needs or there is None or max(needs.values()) <= there:
        return []
    (node, number), needed = max(needs.items(), key=lambda item: item[1])
    sharing = sum(
        (where, gpu) == (node, number) for where, gpu in zip(forecast.ranks.node, forecast.ranks.gpu, strict=True)
    )
    config = forecast.experiment.config
    lanes = f"runtime.lanes (now {config.runtime.lanes}), " if config.runtime.executor == "lanes" else ""
    fewer = f"; {sharing} ranks share it: take one rank per GPU" if sharing > 1 else ""
    return [
        f"GPU {number} of node {node} needs {size(needed)} and has {size(there)}: lower {lanes}training.batch_size "
        f"(now {config.training.batch_size}) or evaluation.batch_size (now {config.evaluation.batch_size}){fewer}"
    ]


def _disk(forecast: Forecast, folder: Path, size: Size) -> list[str]:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if forecast.disk.most <= free:
        return []
    settings = forecast.experiment.config.checkpoint
    keep = "keep fewer" if settings.keep else "keep not all"
    return [
        f"checkpoints need {size(forecast.disk.most)} and {folder.absolute()} has {size(free)} free: {keep} "
        f"(checkpoint.keep, now {settings.keep}), write fewer (checkpoint.every, now {settings.every}), "
        "or give the run a folder with more space (--out)"
    ]
