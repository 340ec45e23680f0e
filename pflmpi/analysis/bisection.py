"""The first round, client and array in which two runs differ, and the settings in which they differ."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.comparable import add_later_defaults
from pflmpi.analysis.run import Run
from pflmpi.config.sections import by_key, find_differences
from pflmpi.errors import CheckpointError
from pflmpi.store import run_folder

_MACHINE_COLUMNS = ("seconds", "memory", "wire")  # in the names of columns that depend on the machine
_IDENTITY = {"recorded.run", "recorded.fork"}  # settings that differ between any two runs


@dataclass(frozen=True)
class Bisection:
    """Where two runs start to differ."""

    same: int | None  # the last round before `first` whose checkpoints are identical; None if there is none
    first: int | None  # the first round whose checkpoints differ; None if none do
    figures: int | None  # the first round whose lines in metrics.csv differ; None if none do

    @property
    def between(self) -> range:
        """Rounds before `first` that may differ too, but lack a checkpoint in one of the runs."""
        if self.first is None:
            return range(0)
        return range(0 if self.same is None else self.same + 1, self.first)


def bisect(first: Run, second: Run) -> Bisection:
    """Finds the first round that differs by a binary search over digests of checkpoints.

    It assumes that runs that differ after a round differ after all later ones.

    Raises:
        CheckpointError: they have no checkpoint of the same round, or one is damaged.
    """
    common = sorted({*first.rounds} & {*second.rounds})
    if not common:
        raise CheckpointError(f"{first.path} and {second.path} have no checkpoint of the same round; run both again")

    def differs(index: int) -> bool:
        return first.round(common[index]).digest() != second.round(common[index]).digest()

    figures, last = _find_first_differing_metrics(first, second), len(common) - 1
    if not differs(last):
        return Bisection(common[last], None, figures)
    place = bisect_left(range(last), True, key=differs)
    return Bisection(common[place - 1] if place else None, common[place], figures)


def _find_first_differing_metrics(first: Run, second: Run) -> int | None:
    metrics = first.verified_metrics, second.verified_metrics
    names = [name for name in metrics[0].names if name in metrics[1].names]
    compared = [name for name in names if not any(part in name for part in _MACHINE_COLUMNS)]
    lost = max(metrics[0].lost, metrics[1].lost)
    for number, (line, other) in enumerate(zip(metrics[0].lines, metrics[1].lines, strict=False), 1):
        if number > lost and any(line[name] != other[name] for name in compared):
            return number
    return None


def differing_arrays(first: Checkpoint, second: Checkpoint) -> tuple[list[str], dict[int, list[str]]]:
    """Paths of the arrays that differ between two checkpoints: of the server, and of each client by its id.

    Raises:
        CheckpointError: a file is damaged.
    """
    clients: dict[int, list[str]] = {}
    length = min(
        run_folder.count_clients_per_block(checkpoint.run, checkpoint.number) for checkpoint in (first, second)
    )
    for start in range(0, max(first.num_clients, second.num_clients), length):
        first_states = _read_states(first, start, length)
        second_states = _read_states(second, start, length)
        for client in sorted(first_states.keys() | second_states.keys()):
            if paths := _find_differing_paths(first_states.get(client, {}), second_states.get(client, {})):
                clients[client] = paths
    return _find_differing_paths(first.server, second.server), clients


def _read_states(checkpoint: Checkpoint, start: int, length: int) -> dict[int, dict[str, np.ndarray]]:
    """The state of a block of clients, by id and path."""
    ids = np.arange(start, min(start + length, checkpoint.num_clients))
    return run_folder.split_by_client(run_folder.read_clients(checkpoint.run, checkpoint.number, ids))


def _find_differing_paths(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> list[str]:
    """The paths whose arrays differ in any bit, sorted."""
    return [path for path in sorted(first.keys() | second.keys()) if _bits(first.get(path)) != _bits(second.get(path))]


def _bits(array: np.ndarray | None) -> Any:
    return None if array is None else (array.dtype, array.shape, array.tobytes())


def differing_settings(first: Run, second: Run) -> Iterator[tuple[str, Any, Any]]:
    """Yields the key and both values of what differs in configuration, hashes of data and code, device and versions."""
    sides = [add_later_defaults(by_key(run.config)) for run in (first, second)]
    for key, (old, new) in find_differences(*sides).items():
        if key not in _IDENTITY:
            yield key, old, new
