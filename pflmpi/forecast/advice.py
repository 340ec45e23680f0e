"""Advice on a forecast: what does not fit, what to change, and which ranks would be idle."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from pflmpi import machine, text
from pflmpi.config.load import Config
from pflmpi.forecast.forecast import Forecast
from pflmpi.runtime.client_state import choose_state_folder
from pflmpi.runtime.round_schedule import advise_fewer_ranks
from pflmpi.text import format_bytes


def find_problems(forecast: Forecast, folder: Path) -> list[str]:
    """Returns what does not fit, each with what to change; the `folder` of the run need not exist yet."""
    return [*_check_nodes(forecast), *_check_gpus(forecast), *_check_disk(forecast, folder)]


def node_bytes(forecast: Forecast, node: int) -> float:
    """Bytes that the ranks of a node need; memory that they share counts once."""
    ranks = [forecast.memory[rank] for rank in forecast.ranks.of_node[node]]
    return sum(rank.total - rank.shared for rank in ranks) + max(rank.shared for rank in ranks)


def gpu_bytes(forecast: Forecast) -> dict[tuple[int, int], float]:
    """Bytes that the ranks of each GPU need, by node and number."""
    needed: dict[tuple[int, int], float] = {}
    for (node, number), memory in zip(forecast.ranks.device, forecast.memory, strict=True):
        if number is not None:
            needed[node, number] = needed.get((node, number), 0.0) + memory.device
    return needed


def find_useless_ranks(forecast: Forecast) -> Iterator[str]:
    """Yields which ranks would be idle or compete for cores, and why."""
    count, cores, threads = forecast.ranks.count, forecast.resources.cores, forecast.ranks.runtime.threads
    busy = {
        rank for rank in range(count) if any(round.training[rank] or round.testing[rank] for round in forecast.rounds)
    }
    idle = [rank for rank in range(1, count) if rank not in busy]
    if idle and forecast.rounds:
        yield f"{text.format_ranks(idle)} will have nothing to do: {_explain_idle(forecast)}"
    if note := advise_fewer_ranks(forecast.setup, forecast.rounds):
        yield note
    for node in range(forecast.resources.nodes):
        on_cpu = [rank for rank in forecast.ranks.of_node[node] if rank in busy and forecast.ranks.gpu[rank] is None]
        if len(on_cpu) * threads > cores:
            yield (
                f"{len(on_cpu)} ranks with {text.pluralize(threads, 'thread')} each compute on the {cores} cores of a "
                "node and take turns; take fewer ranks per node"
                + (", or set runtime.threads lower" if threads > 1 else "")
            )
            return


def _explain_idle(forecast: Forecast) -> str:
    n, placement = forecast.setup.task.num_clients, forecast.setup.placement
    groups = len(placement.groups)
    if groups < min(n, len(placement.computing_ranks)):
        return (
            f"the {n} clients are in {groups} groups of up to {forecast.experiment.config.runtime.lanes}; "
            "set runtime.lanes lower, or take fewer ranks"
        )
    if forecast.ranks.count > n + 1:
        return f"there are {n} clients: at most {n + 1} ranks are of use"
    return "no client is left for them; take fewer ranks"


def _check_nodes(forecast: Forecast) -> Iterator[str]:
    needs = [node_bytes(forecast, node) for node in range(forecast.resources.nodes)]
    largest = max(range(len(needs)), key=needs.__getitem__)
    has = forecast.resources.memory
    if needs[largest] > has:
        change = _advise_less_memory(forecast, largest)
        yield f"node {largest} needs {format_bytes(needs[largest])} of memory and has {format_bytes(has)}: {change}"


def _advise_less_memory(forecast: Forecast, node: int) -> str:
    """Returns what to change so that a node needs less memory; its largest part decides."""
    config = forecast.experiment.config
    ranks = [forecast.memory[rank] for rank in forecast.ranks.of_node[node]]
    parts = {name: sum(getattr(rank, name) for rank in ranks) for name in ("base", "state", "work", "data")}
    parts["state"] += sum(rank.checkpoint for rank in ranks)
    largest = max(parts, key=parts.__getitem__)
    if largest == "state":
        if node == 0 and forecast.sizes.server > parts["state"] / 4:
            return "most of it is the server's state; give rank 0 a node with more memory"
        keeps_replies = config.evaluation.absent == "last_received" and config.algorithm.predicts_with
        latest = " or set evaluation.absent = 'latest', which keeps no replies" if keeps_replies else ""
        disk = ", set runtime.state=disk" if config.runtime.state == "memory" else ""
        return f"most of it is the state of the clients that live there; take more nodes{disk}{latest}"
    if largest == "work":
        return f"most of it is for computing; lower {_name_batch_settings(config)}, or take fewer ranks per node"
    return "take fewer ranks per node; a rank can compute many clients"


def _check_gpus(forecast: Forecast) -> Iterator[str]:
    needs, has = gpu_bytes(forecast), forecast.gpu_memory
    if not needs or has is None or max(needs.values()) <= has:
        return
    (node, number), needed = max(needs.items(), key=lambda item: item[1])
    sharing = forecast.ranks.device.count((node, number))
    fewer = f"; {sharing} ranks share it: take one rank per GPU" if sharing > 1 else ""
    change = f"lower {_name_batch_settings(forecast.experiment.config)}{fewer}"
    yield f"GPU {number} of node {node} needs {format_bytes(needed)} and has {format_bytes(has)}: {change}"


def _check_disk(forecast: Forecast, folder: Path) -> Iterator[str]:
    folder, config = machine.nearest_existing(folder), forecast.experiment.config
    settings, checkpoints, state = config.checkpoint, forecast.disk.most, forecast.state_on_disk
    scratch = choose_state_folder(config.runtime, folder)
    if scratch is not None and scratch != folder:
        needed = state / forecast.resources.nodes
        if scratch.is_dir() and needed > (free := shutil.disk_usage(scratch).free):
            has = f"{scratch} has {format_bytes(free)} free"
            yield f"clients' state needs {format_bytes(needed)} and {has}: name another runtime.scratch"
        state = 0
    free = shutil.disk_usage(folder).free
    if checkpoints + state > free:
        keep = "keep fewer" if settings.keep else "keep not all"
        also = f" and the state of clients {format_bytes(state)}" if state else ""
        yield (
            f"checkpoints need {format_bytes(checkpoints)}{also} and {folder} has {format_bytes(free)} free: {keep} "
            f"(checkpoint.keep, now {settings.keep}), write fewer (checkpoint.every, now {settings.every}), "
            "or give the run a folder with more space (--out)"
        )


def _name_batch_settings(config: Config) -> str:
    """Names the settings that decide how much is computed at once."""
    lanes = f"runtime.lanes (now {config.runtime.lanes}), " if config.runtime.executor == "lanes" else ""
    return (
        f"{lanes}training.batch_size (now {config.training.batch_size}) or "
        f"evaluation.batch_size (now {config.evaluation.batch_size})"
    )
