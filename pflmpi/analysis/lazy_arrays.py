"""The state of a run over rounds as a lazy xarray.Dataset."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xarray
from xarray.backends import BackendArray
from xarray.core import indexing

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.registry import format_unknown_name
from pflmpi.store import run_folder

_SERVER = "server/"  # prefix of the paths of the server's state
_MOST_CACHED = 4  # checkpoints whose layouts stay in memory


def open_dataset(
    open_round: Callable[[int], Checkpoint], rounds: Sequence[int], leaves: Iterable[str] | None
) -> xarray.Dataset:
    """The dataset that `Run.to_xarray` returns.

    Args:
        open_round: returns the checkpoint of a round.
        rounds: at least one; each has a checkpoint.
        leaves: paths of leaves; None for all.

    Raises:
        ConfigError: there is no such leaf.
    """
    open_round = lru_cache(_MOST_CACHED)(open_round)
    first = open_round(rounds[0])
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
            raise ConfigError(format_unknown_name("leaf", path, known))
        axes, shape, dtype = arrays[path]
        if not path.startswith(_SERVER):
            coordinates[axes[0]] = first.clients[path].clients
        rows = _LeafOverRounds(open_round, np.array(rounds), path, shape, dtype)
        variables[path] = (("round", *axes), indexing.LazilyIndexedArray(rows))
    if (class_names := first.class_names) and any("class" in axes for axes, _ in variables.values()):
        coordinates["class"] = class_names
    return xarray.Dataset(variables, coordinates, {"run": str(first.attributes.get("run", ""))})


class _LeafOverRounds(BackendArray):
    """One leaf [rounds, ...] of the clients or the server."""

    def __init__(
        self,
        open_round: Callable[[int], Checkpoint],
        rounds: np.ndarray,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
    ) -> None:
        self._open_round, self._rounds, self._path = open_round, rounds, path
        self.shape, self.dtype = (len(rounds), *shape), dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        """Reads the values at an index for each axis: an integer, a slice, or an array [n] of integers."""
        round_index, *rest = key
        numbers = self._rounds[round_index]
        if not numbers.ndim:
            return self._read_round(int(numbers), rest)
        if not len(numbers):
            unread = np.broadcast_to(np.zeros((), self.dtype), self.shape[1:])
            return np.empty((0, *_index_axes(unread, rest).shape), self.dtype)
        return np.stack([self._read_round(int(number), rest) for number in numbers])

    def _read_round(self, number: int, index: Sequence[Any]) -> np.ndarray:
        checkpoint = self._open_round(number)
        leaf: Any
        if self._path.startswith(_SERVER):
            leaf = checkpoint.server_leaf(self._path.removeprefix(_SERVER))
        else:
            leaf = checkpoint.clients.get(self._path)
        if leaf is None or leaf.shape != self.shape[1:]:
            shape = "missing" if leaf is None else list(leaf.shape)
            raise CheckpointError(
                f"{self._path} of round {number} is {shape}, and {list(self.shape[1:])} in round {self._rounds[0]}; "
                "choose rounds in which it is the same"
            )
        return _index_axes(leaf, index)


def _index_axes(array: Any, index: Sequence[Any]) -> np.ndarray:
    """Indexes one axis after the other, so that of lazy rows only the selected ones are read."""
    values, axis = array, 0
    for axis_index in index:
        values = values[(*(slice(None),) * axis, axis_index)]
        axis += isinstance(axis_index, slice | np.ndarray)  # an integer removes the axis
    return np.asarray(values)
