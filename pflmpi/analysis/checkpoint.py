"""One checkpoint of a run, read as it is needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from pflmpi.analysis.leaf_rows import LeafRows, Leaves
from pflmpi.errors import CheckpointError
from pflmpi.store import run_folder
from pflmpi.store.checked_hdf5 import cut_short
from pflmpi.store.layout import Layout
from pflmpi.store.names import round_path


@dataclass(frozen=True, eq=False)
class Round:
    """The state of a run after a round. Nothing is read before it is asked for, and then once.

    All that is read here raises `CheckpointError` where a file is missing, damaged or of a newer format.

    Attributes:
        run: the folder.
        number: of the round.
    """

    run: Path
    number: int

    @cached_property
    def clients(self) -> Mapping[str, LeafRows]:
        """What the clients keep, by path: lazy arrays [N, ...] in client order; see `Leaves` for unlike models."""
        one = len(self.cohorts) == 1
        return Leaves(
            {
                leaf if one else f"{cohort}/{leaf}": LeafRows(
                    ids := self.cohorts[cohort], (len(ids), *shape), dtype, self.run, self._layout, cohort, leaf
                )
                for cohort, kinds in run_folder.read_kinds(self.run, self.number).items()
                for leaf, (shape, dtype) in kinds.items()
            }
        )

    @cached_property
    def cohorts(self) -> Mapping[str, np.ndarray]:
        """The ascending ids [m] of the clients of each cohort: those with one and the same model."""
        return self._layout.cohorts

    @cached_property
    def server(self) -> Mapping[str, np.ndarray]:
        """What the server keeps, by path."""
        return run_folder.read_server(self.run, self.number)

    @cached_property
    def metrics(self) -> Mapping[str, np.ndarray]:
        """The figures of the round: participants [P], correct, total, accuracy [N], seconds_* []."""
        return run_folder.read_metrics(self.run, self.number)

    @cached_property
    def bytes(self) -> Mapping[str, np.ndarray]:
        """The traffic of the round in bytes: up, down [N] as papers count; wire_up, wire_down [] as moved."""
        return run_folder.read_bytes(self.run, self.number)

    def digest(self) -> str:
        """Return the SHA-256 over the state of the server and all clients, as `pflmpi inspect --digest` prints it."""
        return run_folder.digest(self.run, self.number)

    def verify(self) -> list[str]:
        """Return what is wrong with the files of the round, one line each; every byte of them is read."""
        return run_folder.verify(self.run, self.number)

    def written_since(self, before: "Round") -> np.ndarray:
        """Return [N] bool: whose rows were written after an earlier round; the others are the same bytes on disk."""
        return np.array([here != there for here, there in zip(self._places(), before._places(), strict=True)], bool)

    def _places(self) -> list[tuple[str, int]]:
        files = [*self._layout.files, ""]  # the last stands for index -1: no row
        return [(files[file], int(row)) for file, row in zip(self._layout.file, self._layout.row, strict=True)]

    def shortened(self) -> list[str]:
        """Return which files of the round are missing or have not the length that was written; little is read."""
        if problem := cut_short(round_path(self.run, self.number)):
            return [problem]
        try:
            files = self._layout.files
        except CheckpointError as error:
            return [str(error)]
        return [problem for name in files if (problem := cut_short(self.run / name))]

    @cached_property
    def _layout(self) -> Layout:
        return run_folder.read_layout(self.run, self.number)
