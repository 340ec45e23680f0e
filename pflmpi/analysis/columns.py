"""metrics.csv by column."""

from pathlib import Path

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store.metrics import metrics_file


def columns(run: Path) -> dict[str, np.ndarray]:
    """The complete lines of a run's metrics.csv by column, each [rounds].

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


def last(values: np.ndarray) -> float:
    """The newest known value of a column; NaN without any."""
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else float("nan")


def best(values: np.ndarray) -> int | None:
    """The place of the highest known value of a column; None without any."""
    return None if np.isnan(values).all() else int(np.nanargmax(values))


def _numbers(path: Path, name: str, texts: list[str]) -> np.ndarray:
    kind = np.int64 if metrics_file.is_count(name) else np.float64
    try:
        return np.array([kind(text) if text or kind is np.int64 else np.nan for text in texts], kind)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: column {name}: {error}; put it back from a copy") from error
