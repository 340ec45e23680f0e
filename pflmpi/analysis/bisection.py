"""The first round, client and array in which two runs differ, and what they were run with."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.comparable import add_later_defaults
from pflmpi.analysis.run import Run
from pflmpi.config.sections import by_key
from pflmpi.errors import CheckpointError
from pflmpi.store import run_folder

_NOT_FIGURES = ("seconds", "memory", "wire")  # parts of the names of columns that the machine decides
_OF_A_RUN = {"recorded.run", "recorded.fork"}  # which no two runs share


@dataclass(frozen=True)
class Bisection:
    """Where two runs part.

    Attributes:
        same: the newest round that is the same in both, of those before `first`; None if there is none.
        first: the first round that differs, of those with a checkpoint in both; None if none does.
        figures: the first round whose figures in metrics.csv differ; None if none does.
    """

    same: int | None
    first: int | None
    figures: int | None

    @property
    def between(self) -> range:
        """The rounds that may be the first to differ and lack a checkpoint in one of the runs."""
        return range(0) if self.first is None else range(0 if self.same is None else self.same + 1, self.first)


def bisect(first: Run, second: Run) -> Bisection:
    """Search the checkpoints that both have by their digests: once runs differ, they are taken to differ from there on.

    Raises:
        CheckpointError: they have no checkpoint of the same round, or one is damaged.
    """
    common = sorted({*first.rounds} & {*second.rounds})
    if not common:
        raise CheckpointError(f"{first.path} and {second.path} have no checkpoint of the same round; run both again")

    @cache
    def differs(place: int) -> bool:
        digests = {run.round(common[place]).digest() for run in (first, second)}
        return len(digests) > 1

    figures, last = _find_first_differing_metrics(first, second), len(common) - 1
    if not differs(last):
        return Bisection(common[last], None, figures)
    low, high = -1, last  # the round at `low` is the same, that at `high` differs
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differs(middle) else (middle, high)
    return Bisection(common[low] if low >= 0 else None, common[high], figures)


def _find_first_differing_metrics(first: Run, second: Run) -> int | None:
    metrics = first.verified_metrics, second.verified_metrics
    names = [name for name in metrics[0].names if name in metrics[1].names]
    compared = [name for name in names if not any(part in name for part in _NOT_FIGURES)]
    lost = max(metrics[0].lost, metrics[1].lost)
    for number, (line, other) in enumerate(zip(metrics[0].lines, metrics[1].lines, strict=False), 1):
        if number > lost and any(line[name] != other[name] for name in compared):
            return number
    return None


def differing_arrays(first: Checkpoint, second: Checkpoint) -> tuple[list[str], dict[int, list[str]]]:
    """Paths of the arrays that differ between two checkpoints: the server's, and by client, ascending, its own.

    Raises:
        CheckpointError: a file is damaged.
    """
    most = max(first.num_clients, second.num_clients)
    clients: dict[int, list[str]] = {}
    length = min(run_folder.block_length(checkpoint.run, checkpoint.number) for checkpoint in (first, second))
    for start in range(0, most, length):
        states = [_read_states(checkpoint, start, length) for checkpoint in (first, second)]
        for client in sorted(states[0].keys() | states[1].keys()):
            if paths := _find_differing_paths(*(state.get(client, {}) for state in states)):
                clients[client] = paths
    return _find_differing_paths(dict(first.server), dict(second.server)), clients


def _read_states(checkpoint: Checkpoint, start: int, length: int) -> dict[int, dict[str, np.ndarray]]:
    """What some clients keep, by id and path."""
    ids = np.arange(start, min(start + length, checkpoint.num_clients))
    return run_folder.by_client(run_folder.read_clients(checkpoint.run, checkpoint.number, ids))


def _find_differing_paths(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> list[str]:
    return [path for path in sorted(first.keys() | second.keys()) if _bits(first.get(path)) != _bits(second.get(path))]


def _bits(array: np.ndarray | None) -> Any:
    return None if array is None else (array.dtype, array.shape, array.tobytes())


def differing_settings(first: Run, second: Run) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs in configuration, hashes of data and code, device and versions: key, and both values."""
    sides = [add_later_defaults(by_key(run.config)) for run in (first, second)]
    for key in sorted((sides[0].keys() | sides[1].keys()) - _OF_A_RUN):
        if sides[0].get(key) != sides[1].get(key):
            yield key, sides[0].get(key), sides[1].get(key)
