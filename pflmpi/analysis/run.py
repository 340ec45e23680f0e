"""A run on disk, opened to read: its configuration, metrics and checkpoints. Needs neither torch nor MPI."""

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.config import stored
from pflmpi.errors import CheckpointError
from pflmpi.store import config_file, metrics_file, run_folder
from pflmpi.store.checked_hdf5 import NewerFormatError
from pflmpi.text import spans

_COUNTS = ("round", "participants", "skipped")


@dataclass(frozen=True, eq=False)
class Run:
    """A run, finished or in progress, here or copied from elsewhere. Made by `open_run`.

    Attributes:
        path: the folder.
        config: the resolved configuration, nested; "recorded" has the hashes of data and partition, and versions.
        name: a short name for legends, the algorithm's; not unique.
    """

    path: Path
    config: dict[str, Any]
    name: str

    @property
    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint now, ascending."""
        return run_folder.rounds(self.path)

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns of metrics.csv, each [rounds], as they are at the first use; see `columns`."""
        return columns(self.path)

    @property
    def metrics(self) -> Any:
        """`columns` as a pandas.DataFrame where pandas is installed, otherwise as a NumPy record array."""
        try:
            return import_module("pandas").DataFrame(dict(self.columns))
        except ImportError:
            kinds = [(name, array.dtype) for name, array in self.columns.items()]
            return np.rec.fromarrays(list(self.columns.values()), kinds)

    def round(self, number: int | None = None) -> Checkpoint:
        """The checkpoint of a round; None for the newest whose files are all there in full length.

        Raises:
            CheckpointError: there is none of that round, or its files are damaged or another round's or run's.
        """
        if number is None:
            return self._newest()
        if number not in (there := self.rounds):
            raise CheckpointError(f"{self.path} has no checkpoint of round {number}; it has {spans(there) or 'none'}")
        found = Checkpoint(self.path, number)
        if problems := found.mistaken():
            raise CheckpointError("; ".join(problems))
        return found

    def _newest(self) -> Checkpoint:
        problems: list[str] = []
        for number in reversed(self.rounds):
            found = Checkpoint(self.path, number)
            if not (problem := found.problems()):
                return found
            problems += problem
        raise CheckpointError(f"{self.path} has no good checkpoint: {'; '.join(dict.fromkeys(problems)) or 'none yet'}")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.name}, checkpoints {spans(self.rounds) or 'none'})"


def open_run(path: str | PathLike[str]) -> Run:
    """The run in a folder.

    Raises:
        CheckpointError: the folder is no run, its configuration cannot be read, or a newer pflmpi wrote it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; name the folder that `pflmpi run` printed")
    _check_format(folder)
    if problem := config_file.damage(folder):
        raise CheckpointError(problem)
    config = stored.read(folder)
    section = config.get("algorithm")
    name = section.get("name") if isinstance(section, dict) else None
    return Run(folder, config, str(name or folder.name).rpartition(":")[2])


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


def _numbers(path: Path, name: str, texts: list[str]) -> np.ndarray:
    kind = np.int64 if name in _COUNTS or name.endswith("_bytes") else np.float64
    try:
        return np.array([kind(text) if text or kind is np.int64 else np.nan for text in texts], kind)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: column {name}: {error}; put it back from a copy") from error


def _check_format(run: Path) -> None:
    """Raise `NewerFormatError` if a newer pflmpi wrote the newest round file; a damaged one is no obstacle."""
    try:
        for number in run_folder.rounds(run)[-1:]:
            run_folder.read_attributes(run, number)
    except NewerFormatError:
        raise
    except CheckpointError:
        pass  # the rounds before it can still be read
