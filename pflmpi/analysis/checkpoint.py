"""One checkpoint of a run, read as it is needed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pflmpi.analysis.leaf_rows import LeafRows, Leaves
from pflmpi.errors import CheckpointError
from pflmpi.learning import diagnostics, personal
from pflmpi.learning.diagnostics import Diagnostic
from pflmpi.learning.personal import Personal
from pflmpi.store import run_folder, verify
from pflmpi.store.layout import Layout
from pflmpi.store.names import round_path

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a run after a round. Nothing is read before it is used, and then once.

    Everything that reads raises `CheckpointError` where a file is missing, damaged or of a newer format.

    Attributes:
        run: the folder.
        number: of the round.
    """

    run: Path
    number: int

    @property
    def path(self) -> Path:
        """The round file."""
        return round_path(self.run, self.number)

    @cached_property
    def clients(self) -> Mapping[str, LeafRows]:
        """State of the clients by path: lazy arrays [N, ...] in client order; see `Leaves` for unlike models."""
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

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self._layout.file)

    @cached_property
    def server(self) -> Mapping[str, np.ndarray]:
        """State of the server by path."""
        return run_folder.read_server(self.run, self.number)

    def server_leaf(self, path: str) -> np.ndarray | None:
        """One array of the server's state, None if it has none of that path; the others are not read."""
        return self._array("server", path)

    @cached_property
    def metrics(self) -> Mapping[str, np.ndarray]:
        """Metrics of the round: participants [P], correct, total, accuracy [N], seconds_* []."""
        return run_folder.read_metrics(self.run, self.number)

    def metric(self, name: str) -> np.ndarray | None:
        """One of `metrics`, None if there is none of that name; the others are not read."""
        return self._array("metrics", name)

    @cached_property
    def participants(self) -> np.ndarray | None:
        """The ascending ids [P] of those who took part in the round; None before the first round."""
        there = self.metrics.get("participants")
        return None if there is None else np.sort(there)

    @cached_property
    def bytes(self) -> Mapping[str, np.ndarray]:
        """Traffic of the round in bytes: up, down [N] as papers count; wire_up, wire_down [] as moved."""
        return run_folder.read_bytes(self.run, self.number)

    @cached_property
    def normalisation(self) -> Mapping[str, np.ndarray]:
        """Mean and deviation of the samples, `mean` and `std` [C] as models take them."""
        return run_folder.read_normalisation(self.run, self.number)

    @cached_property
    def attributes(self) -> Mapping[str, str | int | float]:
        """Attributes of the round file: the configuration, the algorithm, what describes the arrays."""
        return run_folder.read_attributes(self.run, self.number)

    @cached_property
    def personal(self) -> Personal:
        """How the model that a client predicts with is put together.

        Raises:
            CheckpointError: the file does not say.
        """
        return self._described("personal", personal.from_json)

    @cached_property
    def diagnostics(self) -> Mapping[str, Diagnostic]:
        """What the algorithm shows besides scores, by name; raises as `personal`."""
        return self._described("diagnostics", diagnostics.from_json)

    @cached_property
    def measured(self) -> Mapping[str, np.ndarray]:
        """Diagnostics that nobody keeps, by name, with rows [P, ...] in the order of `participants`."""
        return run_folder.read_diagnostics(self.run, self.number)

    def digest(self) -> str:
        """SHA-256 over the state of the server and all clients, as `pflmpi inspect --digest` prints it."""
        return run_folder.digest(self.run, self.number)

    def verify(self) -> list[str]:
        """What is wrong with the files of the round, one line each; every byte of them is read."""
        return verify.problems(self.run, self.number)

    def written_since(self, before: "Checkpoint") -> np.ndarray:
        """Whose rows were written after an earlier round, [N] bool; the others are the same bytes on disk."""
        return np.array([here != there for here, there in zip(self._places(), before._places(), strict=True)], bool)

    def _array(self, section: str, path: str) -> np.ndarray | None:
        return run_folder.read_array(self.run, self.number, section, path)

    def _described(self, name: str, read: Callable[[Any], T]) -> T:
        try:
            return read(json.loads(str(self.attributes[name])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            wrong = f"its attribute {name!r} is missing, or not what pflmpi writes"
            raise CheckpointError(f"{self.path} cannot be read: {wrong}; put a good copy in its place") from error

    def _places(self) -> list[tuple[str, int]]:
        files = [*self._layout.files, ""]  # the last is for index -1: no row
        return [(files[file], int(row)) for file, row in zip(self._layout.file, self._layout.row, strict=True)]

    @cached_property
    def _layout(self) -> Layout:
        return run_folder.read_layout(self.run, self.number)
