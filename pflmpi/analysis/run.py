"""A run on disk, opened to read: its configuration, its metrics, its checkpoints. No torch is needed, and no MPI."""

import json
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.analysis.checkpoint import Round
from pflmpi.analysis.columns import columns, table
from pflmpi.config import yaml_file
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.store import run_folder
from pflmpi.store.checked_hdf5 import NewerFormatError, cut_short
from pflmpi.store.names import round_path
from pflmpi.text import spans

__all__ = ["Round", "Run", "open_run"]

_OWN_ATTRIBUTES = ("config", "format_version", "round")


@dataclass(frozen=True, eq=False)
class Run:
    """A run, finished or still going on, here or copied from elsewhere. Made by `open_run`.

    Attributes:
        path: the folder.
        config: the resolved configuration, nested; "recorded" holds the hashes of data and partition, and versions.
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
        """The columns of metrics.csv, each [rounds], as they are at the first use; see `analysis.columns`.

        Raises:
            CheckpointError: the file is damaged.
        """
        return columns(self.path)

    @property
    def metrics(self) -> Any:
        """`columns` as a pandas.DataFrame where pandas is installed, otherwise as a NumPy record array."""
        return table(self.columns)

    def round(self, number: int | None = None) -> Round:
        """Return a checkpoint; None for the newest whose files are all there in full length.

        Raises:
            CheckpointError: there is none of that round, or its file is damaged.
        """
        if number is None:
            return self._newest()
        if number not in (there := self.rounds):
            raise CheckpointError(f"{self.path} has no checkpoint of round {number}; it has {spans(there) or 'none'}")
        if problem := cut_short(round_path(self.path, number)):
            raise CheckpointError(problem)
        return Round(self.path, number)

    def _newest(self) -> Round:
        problems: list[str] = []
        for number in reversed(self.rounds):
            found = Round(self.path, number)
            if not (problem := found.shortened()):
                return found
            problems += problem
        raise CheckpointError(f"{self.path} has no good checkpoint: {'; '.join(dict.fromkeys(problems)) or 'none yet'}")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.name}, checkpoints {spans(self.rounds) or 'none'})"


def open_run(path: str | PathLike[str]) -> Run:
    """Return the run in a folder.

    Raises:
        CheckpointError: the folder is no run, its configuration cannot be read, or a newer pflmpi wrote it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; name the folder that `pflmpi run` printed")
    there = run_folder.rounds(folder)
    attributes = _attributes(folder, there)
    if (folder / "config.yaml").exists():
        config = _config(folder / "config.yaml")
    elif attributes:  # only the HDF5 files were copied
        config = _recorded(attributes, round_path(folder, there[-1]))
    else:
        raise CheckpointError(
            f"{folder} is not a run: it has no config.yaml and no checkpoint that can be read; "
            "name the folder that `pflmpi run` printed"
        )
    return Run(folder, config, _name(config, folder))


def _attributes(folder: Path, there: list[int]) -> dict[str, Any]:
    """Return what the newest round file says about the run; nothing where it is damaged."""
    try:
        return dict(run_folder.read_attributes(folder, there[-1])) if there else {}
    except NewerFormatError:
        raise
    except CheckpointError:
        return {}  # the rounds before it can still be read


def _config(path: Path) -> dict[str, Any]:
    try:
        return yaml_file.read(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _recorded(attributes: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        config = yaml_file.parse(str(attributes["config"]), f"the configuration in {path}")
    except (ConfigError, KeyError) as error:
        raise CheckpointError(f"{path} does not say how its run was configured: {error}") from error
    recorded = {key: value for key, value in attributes.items() if key not in _OWN_ATTRIBUTES}
    if "versions" in recorded:
        recorded["versions"] = json.loads(recorded["versions"])
    return {**config, "recorded": recorded}


def _name(config: dict[str, Any], folder: Path) -> str:
    section = config.get("algorithm")
    return str(section["name"]) if isinstance(section, dict) and "name" in section else folder.name
