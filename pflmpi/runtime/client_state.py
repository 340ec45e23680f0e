"""The persistent state of the clients that live on a rank, in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.learning import personal
from pflmpi.learning.local_training import OPTIMIZER
from pflmpi.learning.optimizers import initial_state
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.downlink import Reply
from pflmpi.messages.kinds import Downlink, Messages, Own, OwnClasses, with_rows
from pflmpi.messages.packing import to_numpy
from pflmpi.runtime.contract import RECEIVED, calling
from pflmpi.store.names import cohort_name
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Rows:
    """State of some clients of one cohort.

    Attributes:
        clients: [m] ascending ids.
        rows: tree of [m, ...]; written in place as clients train.
    """

    clients: np.ndarray
    rows: Tree

    def positions(self, clients: np.ndarray) -> torch.Tensor:
        """The row of each given client."""
        return torch.from_numpy(np.searchsorted(self.clients, clients))

    def get(self, clients: np.ndarray) -> Tree:
        """A copy of the rows [c, ...] of the given clients."""
        positions = self.positions(clients)
        return tree.map(lambda leaf: leaf.index_select(0, positions), self.rows)


@dataclass(frozen=True)
class Population:
    """All clients that live on a rank.

    Attributes:
        cohorts: the rows of each cohort; a cohort without clients here has none.
        cohort: [N] the cohort of each client.
    """

    cohorts: tuple[Rows, ...]
    cohort: np.ndarray

    def _rows(self, group: np.ndarray) -> Rows:
        return self.cohorts[int(self.cohort[group[0]])]

    def get(self, group: np.ndarray) -> Tree:
        """A copy of the algorithm's state [m, ...] of the clients of a group."""
        return self._without(group, (RECEIVED, OPTIMIZER))

    def to_train(self, group: np.ndarray) -> Tree:
        """As `get`, with the optimizer state that is kept between rounds."""
        return self._without(group, (RECEIVED,))

    def _without(self, group: np.ndarray, names: tuple[str, ...]) -> Tree:
        rows = self._rows(group)
        mine: Tree = {name: value for name, value in rows.rows.items() if name not in names}
        return Rows(rows.clients, mine).get(group)

    def put(self, group: np.ndarray, state: Tree) -> None:
        """Overwrite the state of the clients of a group."""
        rows = self._rows(group)
        positions = rows.positions(group)
        target: Tree = {name: rows.rows[name] for name in state}
        tree.map(lambda leaf, new: leaf.index_copy_(0, positions, new), target, state)

    def keep_reply(self, group: np.ndarray, reply: Reply) -> None:
        """Remember what the clients of a group have received, where they are tested with it while absent."""
        rows = self._rows(group).rows
        if RECEIVED in rows:
            self.put(group, {RECEIVED: {**reply.for_clients(group, tree.part(rows, RECEIVED))}})

    def received(self, group: np.ndarray, reply: Reply, names: tuple[str, ...]) -> Messages:
        """The named messages [m, ...] that the clients of a group are tested with."""
        rows = self._rows(group)
        if RECEIVED not in rows.rows:
            return reply.for_clients(group, names)
        return tree.part(rows.get(group), RECEIVED)  # type: ignore[return-value]

    def flat(self, clients: np.ndarray) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
        """A copy of the given clients' state by cohort name: ids [m] and arrays [m, ...] by path."""
        result = {}
        for number, rows in enumerate(self.cohorts):
            mine = clients[np.isin(clients, rows.clients)]
            if len(mine) and rows.rows:
                arrays = {path: to_numpy(leaf) for path, leaf in tree.leaves(rows.get(mine))}
                result[cohort_name(number)] = (mine, arrays)
        return result


def client_templates(
    algorithm: Algorithm, tasks: Sequence[Task], cohort: np.ndarray, kept_reply: tuple[str, ...]
) -> tuple[Tree, ...]:
    """What a client of each cohort keeps between rounds, as a template.

    Args:
        tasks: one per cohort.
        cohort: [N] the cohort of each client.
        kept_reply: names of the messages that a client keeps to be tested with while it is absent.
    """
    templates = []
    for number, task in enumerate(tasks):
        host = task.replace(device=HOST)
        template = tree.like(algorithm.init_client(host, int(np.flatnonzero(cohort == number)[0])))
        if task.training.keep_optimizer:
            trained = algorithm.trainings(host).items()
            template[OPTIMIZER] = tree.like({name: initial_state(task.training, one) for name, one in trained})
        if kept_reply:
            kinds = algorithm.downlink(host)
            template[RECEIVED] = {name: _received(kinds[name], task.num_classes) for name in kept_reply}
        templates.append(template)
    return tuple(templates)


def row_kinds(templates: Sequence[Tree]) -> dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]]:
    """For each cohort by its name in checkpoints, path -> (shape, dtype) of what a client keeps."""
    return {
        cohort_name(number): {
            path: (tuple(leaf.shape), to_numpy(leaf.new_empty((), device="cpu")).dtype)
            for path, leaf in tree.leaves(template)
        }
        for number, template in enumerate(templates)
    }


def allocate(cohort: np.ndarray, hosted: np.ndarray, templates: Sequence[Tree]) -> Population:
    """The population of a rank, with rows not yet filled.

    Args:
        cohort: [N].
        hosted: ascending ids of the clients that live here.
        templates: one per cohort, what a client keeps.
    """
    cohorts = []
    for number, template in enumerate(templates):
        clients = hosted[cohort[hosted] == number]
        cohorts.append(Rows(clients, _zeros(template, len(clients))))
    return Population(tuple(cohorts), cohort)


def initialise(population: Population, algorithm: Algorithm, tasks: Sequence[Task]) -> None:
    """Fill the rows with what the clients keep before the first round."""
    for rows, task in zip(population.cohorts, tasks, strict=True):
        host = task.replace(device=HOST)
        with calling(algorithm, "init_client", 0):
            for row, client in enumerate(rows.clients):
                state = algorithm.init_client(host, int(client))
                target: Tree = {name: rows.rows[name] for name in state}
                tree.map(lambda leaf, new, row=row: leaf[row].copy_(new), target, state)


def from_flat(flat: dict[str, np.ndarray]) -> Tree:
    """The tree of arrays given by path."""
    return tree.unflatten({path: torch.from_numpy(np.ascontiguousarray(array)) for path, array in flat.items()})


def _zeros(template: Tree, rows: int) -> Tree:
    return tree.map(lambda leaf: torch.zeros(rows, *leaf.shape, dtype=leaf.dtype), template)


def _received(kind: Downlink, num_classes: int) -> Tree:
    return with_rows(kind.like, num_classes) if isinstance(kind, OwnClasses) else kind.like


def received(algorithm: Algorithm, task: Task, templates: Sequence[Tree]) -> dict[str, bool]:
    """Messages that personal models are put together from and no client keeps; true where each has a row of its own."""
    if RECEIVED in templates[0]:
        return {}
    names = personal.messages(algorithm.personal(task))
    return {name: isinstance(algorithm.downlink(task)[name], Own) for name in sorted(names)}
