"""The state of a run over rounds as an xarray.Dataset that reads what is used of it."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xarray
from xarray.backends import BackendArray
from xarray.core import indexing

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.registry import unknown
from pflmpi.store import run_folder

_SERVER = "server/"  # before the paths of what the server keeps
_AT_ONCE = 4  # checkpoints whose layouts are in memory


def open_dataset(
    opened: Callable[[int], Checkpoint], rounds: Sequence[int], leaves: Iterable[str] | None
) -> xarray.Dataset:
    """What `Run.to_xarray` returns.

    Args:
        opened: gives the checkpoint of a round.
        rounds: at least one; all have a checkpoint.

    Raises:
        ConfigError: there is no such leaf.
    """
    opened = lru_cache(_AT_ONCE)(opened)
    first = opened(rounds[0])
    arrays = {
        path.removeprefix("clients/"): array
        for path, array in run_folder.read_named_arrays(first.run, rounds[0]).items()
    }
    known = [path for path in arrays if path.startswith(_SERVER) or path in first.clients]
    paths = known if leaves is None else [path if path in known else path.replace(".", "/") for path in leaves]
    coordinates: dict[str, Any] = {"round": list(rounds)}
    variables = {}
    for path in paths:
        if path not in known:
            raise ConfigError(unknown("leaf", path, known))
        axes, shape, dtype = arrays[path]
        if not path.startswith(_SERVER):
            coordinates[axes[0]] = first.clients[path].clients
        rows = _OverRounds(opened, np.array(rounds), path, shape, dtype)
        variables[path] = (("round", *axes), indexing.LazilyIndexedArray(rows))
    class_names = json.loads(str(first.attributes.get("class_names", "[]")))
    if class_names and any("class" in axes for axes, _ in variables.values()):
        coordinates["class"] = class_names
    return xarray.Dataset(variables, coordinates, {"run": str(first.attributes.get("run", ""))})


class _OverRounds(BackendArray):
    """One leaf [rounds, ...] of the clients or the server."""

    def __init__(
        self,
        opened: Callable[[int], Checkpoint],
        rounds: np.ndarray,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
    ) -> None:
        self._opened, self._rounds, self._path = opened, rounds, path
        self.shape, self.dtype = (len(rounds), *shape), dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        """The values at an index for each axis: an integer, a slice, or an array [n] of integers."""
        of_rounds, *rest = key
        numbers = self._rounds[of_rounds]
        if not numbers.ndim:
            return self._of_round(int(numbers), rest)
        if not len(numbers):
            nothing = np.broadcast_to(np.zeros((), self.dtype), self.shape[1:])
            return np.empty((0, *_index_axes(nothing, rest).shape), self.dtype)
        return np.stack([self._of_round(int(number), rest) for number in numbers])

    def _of_round(self, number: int, index: Sequence[Any]) -> np.ndarray:
        checkpoint, server = self._opened(number), self._path.removeprefix(_SERVER)
        leaf = checkpoint.clients.get(self._path) if server == self._path else checkpoint.server_leaf(server)
        if leaf is None or leaf.shape != self.shape[1:]:
            shape = "missing" if leaf is None else list(leaf.shape)
            raise CheckpointError(
                f"{self._path} of round {number} is {shape}, and {list(self.shape[1:])} in round {self._rounds[0]}; "
                "choose rounds in which it is the same"
            )
        return _index_axes(leaf, index)


def _index_axes(array: Any, index: Sequence[Any]) -> np.ndarray:
    """The values at an index for each axis, one axis after the other; of the first only the rows named are read."""
    values, axis = array, 0
    for of_axis in index:
        values = values[(*(slice(None),) * axis, of_axis)]
        axis += isinstance(of_axis, slice | np.ndarray)
    return np.asarray(values)
