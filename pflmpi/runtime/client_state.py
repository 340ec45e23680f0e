"""The persistent state of the clients that live on a rank, in host memory."""

from dataclasses import dataclass

import numpy as np
import torch

from pflmpi import tree
from pflmpi.messages.downlink import Reply
from pflmpi.messages.kinds import Messages
from pflmpi.messages.packing import to_numpy
from pflmpi.store.names import cohort_name
from pflmpi.tree import Tree

RECEIVED = "received"  # where a client's last reply is kept, beside what the algorithm keeps


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
        """Return the row of each given client."""
        return torch.from_numpy(np.searchsorted(self.clients, clients))

    def get(self, clients: np.ndarray) -> Tree:
        """Return a copy of the rows [c, ...] of the given clients."""
        positions = self.positions(clients)
        return tree.map(lambda leaf: leaf.index_select(0, positions), self.rows)


@dataclass(frozen=True)
class Population:
    """All clients that live on a rank.

    Attributes:
        cohorts: the rows of each cohort; a cohort without clients here has none.
        cohort: [N] the cohort of each client.
        kept_reply: names of the messages that a client is tested with until it receives new ones; empty where
            all are tested with the newest.
    """

    cohorts: tuple[Rows, ...]
    cohort: np.ndarray
    kept_reply: tuple[str, ...]

    def _rows(self, group: np.ndarray) -> Rows:
        return self.cohorts[int(self.cohort[group[0]])]

    def get(self, group: np.ndarray) -> Tree:
        """Return a copy of the algorithm's state [m, ...] of the clients of a group."""
        rows = self._rows(group)
        mine: Tree = {name: value for name, value in rows.rows.items() if name != RECEIVED}
        return Rows(rows.clients, mine).get(group)

    def put(self, group: np.ndarray, state: Tree) -> None:
        """Overwrite the state of the clients of a group."""
        rows = self._rows(group)
        positions = rows.positions(group)
        target: Tree = {name: rows.rows[name] for name in state}
        tree.map(lambda leaf, new: leaf.index_copy_(0, positions, new), target, state)

    def keep_reply(self, group: np.ndarray, reply: Reply) -> None:
        """Remember the reply as the last that the clients of a group received."""
        if self.kept_reply:
            self.put(group, {RECEIVED: {**reply.for_clients(group, self.kept_reply)}})

    def received(self, group: np.ndarray, reply: Reply, names: tuple[str, ...]) -> Messages:
        """Return the named messages [m, ...], those that the clients of a group are tested with."""
        if not self.kept_reply:
            return reply.for_clients(group, names)
        kept = self._rows(group).get(group)[RECEIVED]
        assert isinstance(kept, dict)
        return kept  # type: ignore[return-value]

    def flat(self, clients: np.ndarray) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Return a copy of the given clients' state by cohort name: ids [m] and arrays [m, ...] by path."""
        result = {}
        for number, rows in enumerate(self.cohorts):
            mine = clients[np.isin(clients, rows.clients)]
            if len(mine) and rows.rows:
                arrays = {path: to_numpy(leaf) for path, leaf in tree.leaves(rows.get(mine))}
                result[cohort_name(number)] = (mine, arrays)
        return result


def allocate(cohort: np.ndarray, hosted: np.ndarray, templates: list[Tree], kept_reply: tuple[str, ...]) -> Population:
    """Return the population of a rank with rows not yet filled.

    Args:
        cohort: [N].
        hosted: ascending ids of the clients that live here.
        templates: state of one client, for each cohort.
        kept_reply: see `Population`.
    """
    cohorts = []
    for number, template in enumerate(templates):
        clients = hosted[cohort[hosted] == number]
        cohorts.append(Rows(clients, _zeros(template, len(clients))))
    return Population(tuple(cohorts), cohort, kept_reply)


def _zeros(template: Tree, rows: int) -> Tree:
    return tree.map(lambda leaf: torch.zeros(rows, *leaf.shape, dtype=leaf.dtype), template)


def from_flat(flat: dict[str, np.ndarray]) -> Tree:
    """Return the tree of arrays given by path."""
    return tree.unflatten({path: torch.from_numpy(np.ascontiguousarray(array)) for path, array in flat.items()})
