"""The columns of a run's metrics.csv as arrays, and as a table."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store import metrics_file

_COUNTS = ("round", "participants")


def columns(run: Path) -> dict[str, np.ndarray]:
    """Return the complete lines of a run's metrics.csv by column, each [rounds].

    Counts and bytes are int64; accuracies (fractions) and seconds are float64, NaN where a round has none. A line that
    is being written is left out; without a file the columns are empty.

    Raises:
        CheckpointError: the file cannot be read, or a value in it is no number.
    """
    path = metrics_file.path(run)
    try:
        lines = metrics_file.read(run)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    names = list(lines[0]) if lines else list(metrics_file.COLUMNS)
    return {name: _numbers(path, name, [line.get(name, "") for line in lines]) for name in names}


def _numbers(path: Path, name: str, texts: list[str]) -> np.ndarray:
    kind = np.int64 if name in _COUNTS or name.endswith("_bytes") else np.float64
    try:
        return np.array([kind(text) if text or kind is np.int64 else np.nan for text in texts], kind)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: column {name}: {error}; put it back from a copy") from error


def table(arrays: Mapping[str, np.ndarray]) -> Any:
    """Return columns of one length as a pandas.DataFrame, or as a NumPy record array where pandas is not installed."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        return np.rec.fromarrays(list(arrays.values()), [(name, array.dtype) for name, array in arrays.items()])
    return pandas.DataFrame(dict(arrays))
