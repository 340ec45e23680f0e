"""The persistent state of the clients that live on a rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, depends_on_client, initial_client, initial_received
from pflmpi.learning import personal
from pflmpi.learning.local_training import OPTIMIZER
from pflmpi.learning.optimizers import initial_state
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.downlink import Reply
from pflmpi.messages.kinds import Downlink, Messages, OwnClasses, with_rows
from pflmpi.messages.packing import to_numpy
from pflmpi.messages.uplink_transforms import RESIDUAL, UplinkConfig, residual_like
from pflmpi.runtime.client_rows import Rows, empty_rows
from pflmpi.runtime.contract import ANSWERED, RECEIVED, answer_templates, calling
from pflmpi.store.names import cohort_name
from pflmpi.tree import Tree


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
        return self._rows(group).get(group, without=(RECEIVED, ANSWERED, RESIDUAL, OPTIMIZER))

    def to_train(self, group: np.ndarray) -> Tree:
        """As `get`, with the optimizer state that is kept between rounds."""
        return self._rows(group).get(group, without=(RECEIVED, ANSWERED, RESIDUAL))

    def answers(self, group: np.ndarray) -> Messages:
        """The kept messages [m, ...] that the clients of a group received last."""
        return self._messages(group, ANSWERED)

    def put(self, group: np.ndarray, state: Tree) -> None:
        self._rows(group).put(group, state)

    def restore(self, clients: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Give clients of one cohort what a checkpoint has: arrays [m, ...] by path; see `Rows.flat`."""
        rows = self._rows(clients)
        common = {path: array for path, array in arrays.items() if array.strides[0] == 0}
        for path, array in common.items():
            rows.begin(clients, path, torch.tensor(array[:1]))
        rows.put(clients, from_flat({path: array for path, array in arrays.items() if path not in common}))

    def keep_reply(self, groups: Sequence[np.ndarray], reply: Reply) -> None:
        """Keep the reply with the clients of some groups, where they are tested with it while absent."""
        groups = [group for group in groups if RECEIVED in self._rows(group).rows]
        reply = reply.on(HOST) if groups else reply
        for group in groups:
            names = tree.part(self._rows(group).rows, RECEIVED)
            self.put(group, {RECEIVED: {**reply.for_clients(group, names)}})

    def received(self, group: np.ndarray, reply: Reply, names: tuple[str, ...]) -> Messages:
        """The named messages [m, ...] that the clients of a group are tested with."""
        return self._messages(group, RECEIVED) or reply.for_clients(group, names)

    def _messages(self, group: np.ndarray, name: str) -> Messages:
        rows = self._rows(group)
        return rows.part(group, name) if name in rows.rows else {}  # type: ignore[return-value]

    def leaf(self, path: str, clients: np.ndarray) -> torch.Tensor:
        """A copy of one leaf [m, ...] of clients that live here, in ascending order; all cohorts have it."""
        like = tree.at(self.cohorts[0].rows, path)
        leaf = like.new_empty(len(clients), *like.shape[1:])
        for rows in self.cohorts:
            members = np.isin(clients, rows.clients)
            leaf[torch.from_numpy(members)] = rows.leaf(clients[members], path)
        return leaf

    def kept(self, name: str, like: Tree, clients: np.ndarray) -> Tree:
        """A copy of the leaves [m, ...] of the named part of the state that a template has; see `Homes`."""
        return tree.unflatten({path: self.leaf(f"{name}/{path}", clients) for path, _ in tree.leaves(like)})

    def flat(self, clients: np.ndarray) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
        """A copy of the given clients' state by cohort name: ids [m] and arrays [m, ...] by path; see `Rows.flat`."""
        result = {}
        for number, rows in enumerate(self.cohorts):
            members = clients[np.isin(clients, rows.clients)]
            if len(members) and rows.rows:
                result[cohort_name(number)] = (members, rows.flat(members))
        return result


def client_templates(
    algorithm: Algorithm,
    tasks: Sequence[Task],
    cohort: np.ndarray,
    kept_reply: tuple[str, ...],
    uplink: UplinkConfig,
) -> tuple[Tree, ...]:
    """Templates of the state that a client of each cohort keeps between rounds.

    Args:
        cohort: [N] the cohort of each client.
        kept_reply: names of the messages that a client keeps to be tested with while it is absent.
        uplink: what it does to the messages that it sends.
    """
    templates = []
    for number, task in enumerate(tasks):
        host = task.replace(device=HOST)
        template = tree.like(initial_client(algorithm, host, int(np.flatnonzero(cohort == number)[0])))
        if task.training.keep_optimizer:
            trainings = algorithm.trainings(host).items()
            states: Tree = {name: initial_state(task.training, trained) for name, trained in trainings}
            template[OPTIMIZER] = tree.like(states)
        if answers := answer_templates(algorithm, host):
            template[ANSWERED] = answers
        if kept_reply:
            kinds = algorithm.downlink(host)
            template[RECEIVED] = {name: _received_like(kinds[name], task.num_classes) for name in kept_reply}
        templates.append({**template, **residual_like(uplink, algorithm.uplink(host))})
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


def allocate(
    cohort: np.ndarray, hosted: np.ndarray, templates: Sequence[Tree], folder: Path | None = None
) -> Population:
    """The population of a rank, with rows not yet filled.

    Args:
        hosted: ascending ids of the clients that live here.
        templates: one per cohort, what a client keeps.
        folder: for a file with the rows; None for memory.
    """
    cohorts = (
        empty_rows(hosted[cohort[hosted] == number], template, folder) for number, template in enumerate(templates)
    )
    return Population(tuple(cohorts), cohort)


def initialise(population: Population, algorithm: Algorithm, tasks: Sequence[Task]) -> None:
    """Fill the rows with what the clients keep before the first round."""
    for rows, task in zip(population.cohorts, tasks, strict=True):
        if len(rows.clients):
            _initialise_rows(rows, algorithm, task.replace(device=HOST))


def _initialise_rows(rows: Rows, algorithm: Algorithm, task: Task) -> None:
    """Fill the rows of one cohort; a state that does not depend on the client is computed once."""
    per_client = depends_on_client(algorithm, task)
    with calling(algorithm, "init_client", 0):
        for position in range(len(rows.clients) if per_client else 1):
            client = int(rows.clients[position])
            state, answers = initial_client(algorithm, task, client), initial_received(algorithm, task, client)
            clients = rows.clients[position : position + 1] if per_client else rows.clients
            for path, leaf in tree.leaves({**state, **({ANSWERED: {**answers}} if answers else {})}):
                rows.begin(clients, path, leaf.unsqueeze(0))


def from_flat(flat: dict[str, np.ndarray]) -> Tree:
    """The tree of arrays given by path."""
    return tree.unflatten({path: torch.from_numpy(np.asarray(array, order="C")) for path, array in flat.items()})


def _received_like(kind: Downlink, num_classes: int) -> Tree:
    return with_rows(kind.like, num_classes) if isinstance(kind, OwnClasses) else kind.like


def stored_messages(algorithm: Algorithm, task: Task, templates: Sequence[Tree]) -> list[str]:
    """Names of the messages that round files store: personal models are made of them, and no client keeps them."""
    return [] if RECEIVED in templates[0] else sorted(personal.messages(algorithm.personal(task)))
