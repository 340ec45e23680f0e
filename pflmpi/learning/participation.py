"""Who takes part in which round, and how much of its work a client can do: known before the run from its seed.

A rule draws the participants of a round: one of the names below, a file of a user's own, or a function

    f(round, count, num_train int64 [N], rng) -> ids of the clients that take part, none twice

which sees what a server may know: the number of the round, that of clients to draw (`training.participation`), and how
many training samples each has. `rng` is its only source of randomness, and the same call must return the same ids.
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
from pflmpi.registry import Registry, function
from pflmpi.rng import stream
from pflmpi.text import short_repr

Rule = Callable[[int, int, np.ndarray, np.random.Generator], np.ndarray]


def uniform(round: int, count: int, num_train: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """All clients alike."""
    return rng.choice(len(num_train), size=count, replace=False)


def by_samples(round: int, count: int, num_train: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One after another, in proportion to training samples."""
    return rng.choice(len(num_train), size=count, replace=False, p=num_train / num_train.sum())


def round_robin(round: int, count: int, num_train: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """In the order of the ids, and from the first one again."""
    return ((round - 1) * count + np.arange(count)) % len(num_train)


SELECTIONS: Registry[Rule] = Registry(
    "selection",
    {"uniform": uniform, "by_samples": by_samples, "round_robin": round_robin},
    accept=function("round", "count", "num_train", "rng", returns="ids of the clients that take part"),
)


def is_trace(selection: str) -> bool:
    """Whether `training.selection` is a file that says who takes part."""
    return selection.endswith(".csv")


@dataclass(frozen=True, eq=False)
class Participation:
    """Who takes part in the rounds of a run."""

    training: TrainingConfig  # the rule, and what keeps clients from taking part or from doing all of their work
    seed: int
    num_train: np.ndarray  # [N] training samples of each client

    def participants(self, round: int) -> np.ndarray:
        """Ascending ids of the clients that train in a round: those drawn, but for those that drop out or are left out.

        Where all would drop out, one of them stays.

        Raises:
            ConfigError: the trace or the user's rule has no such clients.
        """
        training, num_clients = self.training, len(self.num_train)
        if is_trace(training.selection):
            chosen = self._trace.get(round, np.empty(0, np.int64))
        else:
            rng, sizes = stream(self.seed, round, -1, "participants"), self.num_train.view()
            sizes.flags.writeable = False
            with outside.as_config_error():
                chosen = SELECTIONS[training.selection](round, training.num_drawn(num_clients), sizes, rng)
        chosen = _checked(np.asarray(chosen), num_clients, f"training.selection = {training.selection}: round {round}")
        if self.most_steps is not None:
            chosen = chosen[self.most_steps[chosen] > 0]
        if training.dropout and len(chosen):
            draws = stream(self.seed, round, -1, "dropout").random(len(chosen))
            chosen = chosen[(draws >= training.dropout) | (draws == draws.max())]
        if training.without_clients:
            chosen = np.setdiff1d(chosen, training.without_clients)
        return chosen

    @functools.cached_property
    def seconds_per_step(self) -> np.ndarray | None:
        """[N] simulated seconds of a local step of each client; None where they are not simulated."""
        training = self.training
        if training.step_seconds is None:
            return None
        normal = stream(self.seed, 0, -1, "speed").standard_normal(len(self.num_train))
        return np.asarray(training.step_seconds * np.exp(training.step_spread * normal))

    @functools.cached_property
    def most_steps(self) -> np.ndarray | None:
        """[N] int64, local steps that each client can take in a round before the deadline; None without one."""
        if self.training.deadline is None or self.seconds_per_step is None:
            return None
        steps = self.training.deadline / self.seconds_per_step
        return np.minimum(steps * (1 + 1e-12), 2.0**31).astype(np.int64)  # three steps of 0.1 s in 0.3 s

    @functools.cached_property
    def _trace(self) -> dict[int, np.ndarray]:
        """The clients of each round in the file, whose columns are round and client."""
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
        return {round: np.array(of_round) for round, of_round in clients.items()}

    def counts(self, round: int) -> np.ndarray:
        """[N] int64, in how many of the rounds 1 to `round` each client takes part."""
        done, counts = self._newest_counts[0]
        if done > round:
            done, counts = 0, np.zeros_like(counts)
        counts = counts.copy()
        for number in range(done + 1, round + 1):
            counts[self.participants(number)] += 1
        self._newest_counts[0] = round, counts
        return counts.copy()

    @functools.cached_property
    def _newest_counts(self) -> list[tuple[int, np.ndarray]]:
        """The counts that were asked for last, and of which round they are: rounds follow each other."""
        return [(0, np.zeros(len(self.num_train), np.int64))]


def _checked(chosen: np.ndarray, num_clients: int, what: str) -> np.ndarray:
    """The ascending ids, if they are those of clients."""
    if chosen.ndim != 1 or (len(chosen) and chosen.dtype.kind not in "iu"):
        problem = f"{chosen.dtype} {list(chosen.shape)}"
    else:
        ascending = np.sort(chosen).astype(np.int64)
        others = ascending[(ascending < 0) | (ascending >= num_clients)]
        repeated = ascending[1:][np.diff(ascending) == 0]
        if len(ascending) and not len(others) and not len(repeated):
            return ascending
        problem = f"client {others[0]}" if len(others) else f"client {repeated[0]} twice" if len(repeated) else "nobody"
    raise ConfigError(
        f"{what} has {problem}; expected ids of clients, 0 to {num_clients - 1}, at least one, none twice"
    )
