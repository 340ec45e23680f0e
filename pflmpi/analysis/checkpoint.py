"""One checkpoint of a run, read lazily."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.learning import diagnostics, personal
from pflmpi.learning.diagnostics import Diagnostic
from pflmpi.learning.personal import Personal
from pflmpi.registry import format_unknown_name
from pflmpi.store import run_folder, verify
from pflmpi.store.layout import NOWHERE, Layout
from pflmpi.store.names import round_of, round_path
from pflmpi.store.run_folder import read_leaf
from pflmpi.text import short_repr

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a run after a round. Everything is read at its first use, and only once.

    Reading raises `CheckpointError` if a file is missing, damaged or of a newer format.

    Attributes:
        run: the folder of the run.
        number: the round.
    """

    run: Path
    number: int

    @property
    def path(self) -> Path:
        """The round file."""
        return round_path(self.run, self.number)

    @cached_property
    def clients(self) -> "Leaves":
        """State of the clients by path: lazy arrays [N, ...] in client order; see `Leaves` for heterogeneous models."""
        leaves: dict[str, LeafRows] = {}
        for cohort, kinds in run_folder.read_kinds(self.run, self.number).items():
            ids = self.cohorts[cohort]
            prefix = "" if len(self.cohorts) == 1 else f"{cohort}/"
            for leaf, (shape, dtype) in kinds.items():
                rows = LeafRows(ids, (len(ids), *shape), dtype, self.run, self._layout, cohort, leaf)
                leaves[prefix + leaf] = rows
        return Leaves(leaves)

    @property
    def cohorts(self) -> Mapping[str, np.ndarray]:
        """The ascending ids [m] of the clients of each cohort, which share a model architecture."""
        return self._layout.cohorts

    @property
    def num_clients(self) -> int:
        return len(self._layout.file)

    @cached_property
    def server(self) -> Mapping[str, np.ndarray]:
        """State of the server by path."""
        return run_folder.read_server(self.run, self.number)

    def server_leaf(self, path: str) -> np.ndarray | None:
        """One array of the server's state, None if there is no such path; others are not read."""
        return run_folder.read_array(self.run, self.number, "server", path)

    @cached_property
    def metrics(self) -> Mapping[str, np.ndarray]:
        """Metrics of the round: participants [P], correct, total, accuracy [N], seconds_* []."""
        return run_folder.read_metrics(self.run, self.number)

    def metric(self, name: str) -> np.ndarray | None:
        """One of `metrics`, None if there is no such name; others are not read."""
        return run_folder.read_array(self.run, self.number, "metrics", name)

    @cached_property
    def participants(self) -> np.ndarray | None:
        """The ascending ids [P] of the participants of the round; None before the first round."""
        participants = self.metrics.get("participants")
        return None if participants is None else np.sort(participants)

    @cached_property
    def bytes(self) -> Mapping[str, np.ndarray]:
        """Bytes of the round: up, down [N], the sizes of messages; wire_up, wire_down [], what collectives moved."""
        return run_folder.read_bytes(self.run, self.number)

    @cached_property
    def partition(self) -> Mapping[str, np.ndarray]:
        """Samples of each client, `train_samples` and `test_samples` [N]."""
        return run_folder.read_section(self.run, self.number, "partition")

    @cached_property
    def normalisation(self) -> Mapping[str, np.ndarray]:
        """Mean and standard deviation that samples are normalised with, `mean` and `std` [C]."""
        return run_folder.read_section(self.run, self.number, "normalisation")

    @property
    def class_names(self) -> list[str]:
        """Names of the classes [K]; [] if the run recorded none."""
        return [str(name) for name in json.loads(str(self.attributes.get("class_names", "[]")))]

    @property
    def client_names(self) -> list[str]:
        """Names of the clients in the user's own data [N]; [] if it has none."""
        return [str(name) for name in json.loads(str(self.attributes.get("client_names", "[]")))]

    @cached_property
    def attributes(self) -> Mapping[str, str | int | float]:
        """Attributes of the round file: the configuration, the algorithm, descriptions of the arrays."""
        return run_folder.read_attributes(self.run, self.number)

    @cached_property
    def personal(self) -> Personal:
        """How the model that a client predicts with is assembled.

        Raises:
            CheckpointError: the file lacks the description.
        """
        return self._read_description("personal", personal.from_json)

    @cached_property
    def diagnostics(self) -> Mapping[str, Diagnostic]:
        """The diagnostics that the algorithm declares, by name.

        Raises:
            CheckpointError: the file lacks their description, or a name is not allowed.
        """
        by_name = self._read_description("diagnostics", diagnostics.from_json)
        for name in by_name:
            if not diagnostics.DIAGNOSTIC_NAME.fullmatch(name):  # names become file names
                raise CheckpointError(
                    f"{self.path} cannot be read: a diagnostic is named {short_repr(name)}; names have lower-case "
                    "letters, digits and underscores; put a good copy in its place"
                )
        return by_name

    @cached_property
    def measured(self) -> Mapping[str, np.ndarray]:
        """Diagnostics measured in the round, which no state contains: rows [P, ...] in the order of `participants`."""
        return run_folder.read_section(self.run, self.number, "diagnostics")

    def digest(self) -> str:
        """SHA-256 over the state of the server and all clients, as `pflmpi inspect --digest` prints it."""
        return run_folder.digest(self.run, self.number)

    def verify(self) -> list[str]:
        """Problems of the files of the round, one line each; reads every byte."""
        return verify.problems(self.run, self.number)

    def written_since(self, before: "Checkpoint") -> np.ndarray:
        """Clients whose rows were written after an earlier checkpoint, [N] bool; other rows are the same bytes."""
        now, then = self._layout, before._layout
        then_index = {name: index for index, name in enumerate(then.files)}
        # Indices into now.files as indices into then.files; the last entry is for NOWHERE, which is -1.
        to_then = np.array([*(then_index.get(name, len(then_index)) for name in now.files), NOWHERE])
        return np.asarray((to_then[now.file] != then.file) | (now.row != then.row))

    @cached_property
    def trained(self) -> np.ndarray:
        """Clients whose rows were written in any round, [N] bool; the others still have their initial state."""
        rounds = [round_of(Path(name).name) or 0 for name in self._layout.files]
        return np.asarray(np.array([*rounds, 0])[self._layout.file] > 0)

    def _read_description(self, name: str, read: Callable[[Any], T]) -> T:
        try:
            return read(json.loads(str(self.attributes[name])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read: its attribute {name!r} is missing, or not what pflmpi writes; put a good "
                "copy in its place"
            ) from error

    @cached_property
    def _layout(self) -> Layout:
        return run_folder.read_layout(self.run, self.number)


# --- state of the clients as lazy arrays


@dataclass(frozen=True, eq=False)
class LeafRows:
    """One leaf of the clients of a cohort, [m, ...] in the order of `clients`; read when it is indexed.

    `rows[3]`, `rows[[0, 4]]`, `rows[2:5, 0]` read only the rows of these clients, `np.asarray(rows)` reads all. Reading
    all rows of a file checks its checksum; `Checkpoint.verify` checks every byte.
    """

    clients: np.ndarray  # [m] ascending ids
    shape: tuple[int, ...]  # (m, ...)
    dtype: np.dtype
    _run: Path
    _layout: Layout
    _cohort: str
    _leaf: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[position] for position in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows on disk cannot be had without a copy")
        rows = self._read(np.arange(len(self)))
        return rows if dtype is None else rows.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> Any:
        """Indexes like NumPy, but reads only the rows that the first index selects."""
        first, *rest = (index or (...,)) if isinstance(index, tuple) else (index,)
        if isinstance(first, list):
            first = np.array(first) if first else np.empty(0, np.int64)
        if not _selects_clients(first):
            return np.asarray(self)[index]  # an ellipsis, a new axis, a mask over several axes
        wanted = np.arange(len(self))[first]
        unique, positions = np.unique(wanted, return_inverse=True)
        rows = self._read(unique)
        if isinstance(first, slice):
            return (rows if np.array_equal(unique, wanted) else rows[positions])[(slice(None), *rest)]
        return rows[(positions.reshape(wanted.shape)[()], *rest)]

    def __repr__(self) -> str:
        return f"<{self._leaf}: {self.dtype} {list(self.shape)}, not read>"

    def _read(self, positions: np.ndarray) -> np.ndarray:
        like = np.empty(self.shape[1:], self.dtype)
        return read_leaf(self._run, self._layout, self._cohort, self._leaf, self.clients[positions], like)


def _selects_clients(first: object) -> bool:
    """Whether an index applies to the first axis only."""
    if isinstance(first, np.ndarray):
        return first.dtype.kind in "iu" or (first.dtype.kind == "b" and first.ndim == 1)
    return isinstance(first, int | np.integer | slice) and not isinstance(first, bool | np.bool_)


class Leaves(Mapping[str, LeafRows]):
    """The leaves of the clients by path, such as "model/head/weight"; "model/head.weight" works too.

    With heterogeneous models each cohort has leaves of its own, such as "cohort0/model/head/weight".
    """

    def __init__(self, leaves: Mapping[str, LeafRows]) -> None:
        self._leaves = dict(sorted(leaves.items()))

    def __getitem__(self, path: str) -> LeafRows:
        name = path if path in self._leaves else path.replace(".", "/")
        if name not in self._leaves:
            raise KeyError(format_unknown_name("leaf", path, list(self)))
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        return "\n".join(f"{path}: {rows.dtype} {list(rows.shape)}" for path, rows in self.items())
