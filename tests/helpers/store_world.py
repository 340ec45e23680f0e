"""A made-up run for the tests of the store: the state in memory beside what is on disk."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pflmpi.store import metrics_file
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.digest import digest_of_blocks
from pflmpi.store.layout import Layout
from pflmpi.store.names import shard_path
from pflmpi.store.round_file import RoundContent, write_round
from pflmpi.store.shard import write_shard

TEMPLATES: list[dict[str, tuple[tuple[int, ...], np.dtype]]] = [
    {
        "model/body/weight": ((3, 2), np.dtype(np.float32)),
        "model/body/steps": ((), np.dtype(np.int64)),
        "seen": ((4,), np.dtype(bool)),
    },
    {
        "model/body/weight": ((5,), np.dtype(np.float64)),
        "nothing": ((0, 2), np.dtype(np.int32)),
        "seen": ((4,), np.dtype(bool)),
        "small": ((2,), np.dtype(np.uint8)),
    },
    {},
]


def write_metrics(run: Path, rounds: int) -> Checksum:
    """Write a metrics.csv with so many rounds without figures; its checksum."""
    lines = [metrics_file.COLUMNS, *((str(number), *["0"] * 28) for number in range(1, rounds + 1))]
    metrics_file.path(run).write_text("".join(f"{','.join(line)}\n" for line in lines))
    return metrics_file.checksum(metrics_file.read_bytes(run))


class World:
    """The state of N clients and a server, and its way to disk."""

    def __init__(self, run: Path, cohort_of: list[int], seed: int) -> None:
        self.run, self.rng = run, np.random.default_rng(seed)
        self.cohort_of = np.array(cohort_of)
        self.n = len(cohort_of)
        run.mkdir(parents=True, exist_ok=True)
        self.templates = {f"cohort{number}": TEMPLATES[number] for number in sorted(set(cohort_of))}
        self.layout = Layout.unwritten(self.cohort_of)
        self.ids = {name: np.flatnonzero(self.cohort_of == int(name[-1])) for name in self.templates}
        self.state = {
            name: {path: self.draw((len(self.ids[name]), *shape), dtype) for path, (shape, dtype) in leaves.items()}
            for name, leaves in self.templates.items()
        }
        self.changed = np.ones(self.n, bool)
        self.train(np.empty(0, np.int64))

    def draw(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self.rng.integers(0, 2 if np.dtype(dtype) == np.dtype(bool) else 200, shape).astype(dtype)

    def train(self, clients: np.ndarray) -> None:
        """Change the server and the given clients."""
        self.server = {"head/bias": self.draw((3,), np.float32), "head/count": self.draw((), np.int64)}
        self.metrics = {"accuracy": self.rng.random(self.n), "mean": np.array(self.rng.random())}
        self.moved = {"up": self.draw((self.n,), np.int64)}
        self.changed[clients] = True
        for name, leaves in self.state.items():
            rows = np.flatnonzero(np.isin(self.ids[name], clients))
            for _, array in leaves.items():
                array[rows] = self.draw((len(rows), *array.shape[1:]), array.dtype)

    def flat(self, clients: np.ndarray) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
        """The state of some clients as it crosses the interface of the store."""
        result = {}
        for name, leaves in self.state.items():
            rows = np.flatnonzero(np.isin(self.ids[name], clients))
            if len(rows) and leaves:
                result[name] = (self.ids[name][rows], {path: array[rows] for path, array in leaves.items()})
        return result

    def save(self, round: int, ranks: int) -> None:
        """Write a checkpoint as that many ranks would that host clients at random."""
        host = self.rng.integers(0, ranks, self.n)
        changed = self.changed & np.array([bool(self.templates[f"cohort{number}"]) for number in self.cohort_of])
        per_rank = [np.flatnonzero((host == rank) & changed) for rank in range(ranks)]
        for rank, clients in enumerate(per_rank):
            if rows := self.flat(clients):
                write_shard(shard_path(self.run, round, rank), rows)
        layout = self.layout.updated(round, per_rank, self.cohort_of)
        attributes = {"config": "seed: 0\n" * 20000, "ranks": ranks, "share": 0.5}
        content = RoundContent(
            round, self.server, self.metrics, self.moved, metrics_file=write_metrics(self.run, round)
        )
        write_round(self.run, content, layout, self.templates, attributes)
        self.layout = layout
        self.changed[:] = False

    def some(self) -> np.ndarray:
        return np.flatnonzero(self.rng.random(self.n) < 0.4)

    def digest(self) -> str:
        return digest_of_blocks(self.server, [self.flat(np.arange(self.n))])


def alike(actual, expected):
    assert sorted(actual) == sorted(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        assert actual[name].shape == array.shape, name
        assert actual[name].tobytes() == array.tobytes(), name


class Killed(BaseException):
    """The process is dead."""


class Dying:
    """Lets a process die at its n-th step towards the disk; nothing that it does afterwards has any effect.

    Args:
        step: how many steps are done; a write that is not is done by half.
    """

    def __init__(self, patch: pytest.MonkeyPatch, step: int) -> None:
        self.left, self.dead = step, False
        for name in ("pwrite", "pwritev", "fsync", "fdatasync", "replace", "unlink"):
            patch.setattr(os, name, self._step(name, getattr(os, name)))

    def _step(self, name: str, real: Any) -> Any:
        def step(*arguments, **options):
            if not self.dead and self.left > 0:
                self.left -= 1
                return real(*arguments, **options)
            if not self.dead and name in ("pwrite", "pwritev"):
                real(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
            self.dead = True
            raise Killed

        return step
