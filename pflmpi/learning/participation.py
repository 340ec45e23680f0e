"""Client sampling and simulated speeds, all determined by the run's seed.

A selection rule draws the participants of a round: one of the names below, a user's CSV file, or a user's function

    f(round, count, num_train int64 [N], rng) -> ids of the participants, without repetition

It sees what a server may know: the round, the number of clients to draw (`training.participation`), and the clients'
numbers of training samples. `rng` is its only source of randomness; equal calls must return equal ids.
"""

import csv
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pflmpi import outside
from pflmpi.errors import ConfigError
from pflmpi.learning.training import TrainingConfig
from pflmpi.registry import Registry, accept_function
from pflmpi.rng import stream
from pflmpi.text import short_repr

Rule = Callable[[int, int, np.ndarray, np.random.Generator], np.ndarray]


def uniform(round: int, count: int, num_train: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """All clients with equal probability."""
    return rng.choice(len(num_train), size=count, replace=False)


def by_samples(round: int, count: int, num_train: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Drawn in proportion to training samples, without replacement."""
    return rng.choice(len(num_train), size=count, replace=False, p=num_train / num_train.sum())


def round_robin(round: int, count: int, num_train: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """In the order of the ids, starting over after the last."""
    return ((round - 1) * count + np.arange(count)) % len(num_train)


SELECTIONS: Registry[Rule] = Registry(
    "selection",
    {"uniform": uniform, "by_samples": by_samples, "round_robin": round_robin},
    accept=accept_function("round", "count", "num_train", "rng", returns="ids of the clients that take part"),
)


def is_trace(selection: str) -> bool:
    """Whether `training.selection` is a CSV file of participants."""
    return selection.endswith(".csv")


@dataclass(frozen=True, eq=False)
class Participation:
    """The participants of each round of a run, and the number of local steps that each can take."""

    training: TrainingConfig
    seed: int
    num_train: np.ndarray  # [N] training samples of each client

    def participants(self, round: int) -> np.ndarray:
        """Ascending ids of the clients that train in a round.

        Drawn clients are left out if they cannot take a step before the deadline, drop out (one of them always stays),
        or are in `training.without_clients`.
        """
        training, num_clients = self.training, len(self.num_train)
        if is_trace(training.selection):
            drawn = self._trace.get(round, np.empty(0, np.int64))
        else:
            rng, sizes = stream(self.seed, round, -1, "participants"), self.num_train.view()
            sizes.flags.writeable = False
            with outside.as_config_error():
                drawn = self._rule(round, training.num_drawn(num_clients), sizes, rng)
        source = f"training.selection = {training.selection}: round {round}"
        clients = _sort_and_check(np.asarray(drawn), num_clients, source)
        if self.most_steps is not None:
            clients = clients[self.most_steps[clients] > 0]
        if training.dropout and len(clients):
            draws = stream(self.seed, round, -1, "dropout").random(len(clients))
            clients = clients[(draws >= training.dropout) | (draws == draws.max())]
        if training.without_clients:
            clients = np.setdiff1d(clients, training.without_clients)
        return clients

    @functools.cached_property
    def seconds_per_step(self) -> np.ndarray | None:
        """[N] simulated seconds per local step of each client; None if not simulated."""
        training = self.training
        if training.step_seconds is None:
            return None
        normal = stream(self.seed, 0, -1, "speed").standard_normal(len(self.num_train))
        return np.asarray(training.step_seconds * np.exp(training.step_spread * normal))

    @functools.cached_property
    def most_steps(self) -> np.ndarray | None:
        """[N] int64, local steps that each client can take before the deadline; None without a deadline."""
        if self.training.deadline is None or self.seconds_per_step is None:
            return None
        steps = self.training.deadline / self.seconds_per_step
        return np.minimum(steps * (1 + 1e-12), 2.0**31).astype(np.int64)  # so that 0.3 s have three steps of 0.1 s

    @functools.cached_property
    def _rule(self) -> Rule:
        return SELECTIONS[self.training.selection]

    @functools.cached_property
    def _trace(self) -> dict[int, np.ndarray]:
        """The clients of each round in the CSV file."""
        path, clients = self.training.selection, dict[int, list[int]]()
        try:
            with Path(path).open(newline="") as file:
                for line in csv.DictReader(file):
                    clients.setdefault(int(line["round"]), []).append(int(line["client"]))
        except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
            raise ConfigError(
                f"training.selection = {short_repr(path)} cannot be read ({error!r}); expected a CSV file with a first "
                "line `round,client`, and a line for each round and client that takes part in it"
            ) from error
        return {round: np.array(ids) for round, ids in clients.items()}

    def counts(self, round: int) -> np.ndarray:
        """[N] int64, in how many of the rounds 1 to `round` each client takes part."""
        counted_rounds, counts = self._latest_counts[0]
        if counted_rounds > round:
            counted_rounds, counts = 0, np.zeros_like(counts)
        counts = counts.copy()
        for number in range(counted_rounds + 1, round + 1):
            counts[self.participants(number)] += 1
        self._latest_counts[0] = round, counts
        return counts.copy()

    @functools.cached_property
    def _latest_counts(self) -> list[tuple[int, np.ndarray]]:
        """Cache of the latest `counts` with their round: they are asked for round after round."""
        return [(0, np.zeros(len(self.num_train), np.int64))]


def _sort_and_check(clients: np.ndarray, num_clients: int, source: str) -> np.ndarray:
    """The ascending ids; `ConfigError` if they are not distinct ids of clients."""
    if clients.ndim != 1 or (len(clients) and clients.dtype.kind not in "iu"):
        problem = f"{clients.dtype} {list(clients.shape)}"
    else:
        ascending = np.sort(clients).astype(np.int64)
        unknown = ascending[(ascending < 0) | (ascending >= num_clients)]
        repeated = ascending[1:][np.diff(ascending) == 0]
        if len(unknown):
            problem = f"client {unknown[0]}"
        elif len(repeated):
            problem = f"client {repeated[0]} twice"
        elif len(ascending):
            return ascending
        else:
            problem = "nobody"
    raise ConfigError(
        f"{source} has {problem}; expected ids of clients, 0 to {num_clients - 1}, at least one, none twice"
    )
