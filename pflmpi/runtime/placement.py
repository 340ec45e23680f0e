"""Which rank computes which clients, in which groups. Results never depend on the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pflmpi.messages.declared import Declared
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Shared
from pflmpi.runtime.balance import assignment
from pflmpi.runtime.balance.assignment import in_microseconds
from pflmpi.runtime.balance.client_seconds import pace
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.executors.base import Executor
from pflmpi.tree import Tree

MOST_TOGETHER = 32  # clients in one call, where no more are configured
_ROUNDS = 1000  # homes are chosen by the work of as many rounds


@dataclass(frozen=True)
class Placement:
    """Where clients live.

    Attributes:
        ranks: number of ranks.
        groups: the lanes: groups of clients of one cohort, of which a rank computes those at hand together.
        most: clients in one call; of a group with more at hand, several calls are made.
        home: [N] the rank of each client, or None when clients keep nothing and may be computed anywhere.
        hosts: the ranks that compute.
        work: [N] the relative cost of one round of training.
        pace: [N] microseconds of each client for a unit of work, as measured before the start; None if they were not.
    """

    ranks: int
    groups: tuple[ClientGroup, ...]
    most: int
    home: np.ndarray | None
    hosts: tuple[int, ...]
    work: np.ndarray
    pace: np.ndarray | None = None

    def assign(
        self, clients: np.ndarray, work: np.ndarray | None = None, pace: np.ndarray | None = None
    ) -> list[list[ClientGroup]]:
        """The groups of each rank, restricted to the given clients and cut where these are too many for a call.

        Args:
            clients: ascending ids.
            work: [N] the cost of each client, where it is not that of a round of training.
            pace: [N] microseconds of each client for a unit of work, if they were measured: its cost is then their
                product, where that makes the slowest rank clearly quicker. A client with a home stays there.
        """
        ranks: list[list[ClientGroup]] = [[] for _ in range(self.ranks)]
        if not len(clients):
            return ranks
        ordered = clients[np.argsort(self.group_of[clients], kind="stable")]
        first = np.flatnonzero(np.diff(self.group_of[ordered], prepend=-1))
        place = np.arange(len(ordered)) - np.repeat(first, np.diff(first, append=len(ordered)))
        starts = np.flatnonzero(place % self.most == 0)
        parts = [ordered[start:end] for start, end in zip(starts, [*starts[1:], len(ordered)], strict=True)]
        if self.home is not None:
            for rank, part in zip(self.home[ordered[starts]], parts, strict=True):
                ranks[rank].append(part)
            return ranks
        each, first_ids = self.work if work is None else work, ordered[starts]
        assigned = assignment.longest_first(np.add.reduceat(each[ordered], starts), first_ids, self.hosts)
        if pace is not None:
            cost = np.add.reduceat(in_microseconds(each, pace)[ordered], starts)
            other = assignment.longest_first(cost, first_ids, self.hosts)
            assigned = assignment.clearly_quicker(assigned, other, lambda one: assignment.makespan(one, cost))
        for rank, call in assigned:
            ranks[rank].append(parts[call])
        return ranks

    @cached_property
    def group_of(self) -> np.ndarray:
        """[N] the index of each client's group."""
        group_of = np.empty(len(self.work), np.int64)
        for index, group in enumerate(self.groups):
            group_of[group] = index
        return group_of

    def at_home(self, clients: np.ndarray) -> list[np.ndarray]:
        """Those of the given clients whose state lives on each rank; none where clients keep nothing."""
        if self.home is None:
            return [clients[:0]] * self.ranks
        clients = clients[np.argsort(self.home[clients], kind="stable")]
        ends = np.searchsorted(self.home[clients], np.arange(self.ranks + 1)).tolist()
        return [clients[slice(*ends[rank : rank + 2])] for rank in range(self.ranks)]

    def hosted(self, rank: int) -> np.ndarray:
        """Ascending ids of the clients whose state lives on a rank."""
        if self.home is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.home == rank).astype(np.int64)


def place(
    executor: Executor,
    declared: Declared,
    templates: Sequence[Tree],
    runtime: RuntimeConfig,
    ranks: int,
    slots: int,
    seconds: np.ndarray,
) -> Placement:
    """Cut the clients into groups, and give each a home rank unless it keeps nothing and gets no message of its own.

    Args:
        executor: knows the clients and their data.
        declared: what they receive.
        templates: one per cohort, what a client keeps.
        runtime: settings, with `lanes` decided.
        ranks: R.
        slots: how many ranks can compute at once.
        seconds: [N, 3] measured so far; see `client_seconds`.
    """
    training, seed, federation = executor.tasks[0].training, executor.tasks[0].seed, executor.federation
    n, num_test = federation.num_clients, federation.num_test
    steps = np.array([training.num_steps(int(samples)) for samples in federation.num_train], np.int64)
    lanes = runtime.lanes or 1
    groups, most = cut_groups(executor.cohort, steps, lanes), max(MOST_TOGETHER, int(lanes * training.participation))
    hosts = choose_hosts(runtime.server, ranks, n, slots)
    work = 3.0 * steps * training.batch_size  # forward, and twice as much backward
    measured = pace(seconds, work)
    known = measured if runtime.balance == "measured" and measured.any() else None
    if not any(templates) and all(type(kind) is Shared for kind in declared.down.values()):
        return Placement(ranks, groups, most, None, hosts, work, known)
    cost = np.zeros((n, min(max(training.rounds, 1), _ROUNDS)))
    for round in range(cost.shape[1]):
        chosen = training.participants(seed, round + 1, n)
        cost[chosen, round] = work[chosen] + num_test[chosen]
    if executor.algorithm.predicts_with:
        cost += num_test[:, None]
    home = assignment.place_clients(groups, cost, hosts)
    if known is not None:
        cost = in_microseconds(cost, known[:, None])
        other = assignment.place_clients(groups, cost, hosts)
        home = assignment.clearly_quicker(home, other, lambda one: assignment.total_makespan(one, cost))
    return Placement(ranks, groups, most, home, hosts, work, known)


def cut_groups(cohort: np.ndarray, steps: np.ndarray, lanes: int) -> tuple[ClientGroup, ...]:
    """Groups of at most `lanes` clients of one cohort; those with similar numbers of steps are together.

    The cut depends on the clients alone, never on ranks: the lanes of a call decide its bits.

    Args:
        cohort: [N] the cohort of each client.
        steps: [N] local steps per round; a call lasts as long as its longest lane.
        lanes: L.
    """
    groups = []
    for which in np.unique(cohort):
        members = np.flatnonzero(cohort == which)
        members = members[np.argsort(steps[members], kind="stable")]
        count = -(-len(members) // lanes)
        groups += [np.sort(chunk).astype(np.int64) for chunk in np.array_split(members, count)]
    return tuple(groups)


def choose_hosts(server: str, ranks: int, clients: int, slots: int) -> tuple[int, ...]:
    """The ranks that compute clients.

    Args:
        server: `shared` (rank 0 computes too), `dedicated` (it serves only) or `auto`: dedicated in the classic
            layout of one client per rank, and where there are more ranks than can compute at once.
        ranks: number of ranks.
        clients: N.
        slots: how many ranks can compute at once on all nodes.
    """
    dedicated = server == "dedicated" or (server == "auto" and (ranks == clients + 1 or ranks > slots))
    return tuple(range(1, ranks)) if dedicated and ranks > 1 else tuple(range(ranks))
