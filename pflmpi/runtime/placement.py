"""Which rank computes which clients, in which groups, so that the slowest has the least to do.

Results never depend on the ranks, and the placement on nothing that is measured.
"""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from pflmpi import tree
from pflmpi.learning.task import HOST, Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.messages.declared import Declared
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Shared
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.executors.base import Executor
from pflmpi.tree import Tree

MAX_TOGETHER = 32  # clients in one call, where no more are configured
_MAX_ROUNDS = 1000  # homes are chosen by the work of as many rounds
_MAX_COMPARED = 2**15  # loads that are compared for the home of a client
_FIRST_COMPARED = 32  # ranks, at first
_MIN_TEST_CALLS = 1024  # calls of a test of all, at least, whatever there is to test
_MAX_TEST_BYTES = 2**26  # bytes of the models of such a call


@dataclass(frozen=True)
class Placement:
    """Groups of clients, and the rank that each client lives on.

    Attributes:
        groups: the lanes: groups of clients of one cohort, of which a rank computes those at hand together.
        most: clients in one call; of a group with more at hand, several calls are made.
        most_tested: the same of a call that tests.
        home: [N] the rank of each client, or None when clients keep nothing and may be computed anywhere.
        computing_ranks: the ranks that compute clients.
        work: [N] the relative cost of one round of training, whole numbers.
        test_work: [N] that of testing.
    """

    ranks: int
    groups: tuple[ClientGroup, ...]
    most: int
    home: np.ndarray | None
    computing_ranks: tuple[int, ...]
    work: np.ndarray
    test_work: np.ndarray
    most_tested: int = MAX_TOGETHER

    def assign(self, clients: np.ndarray, tested: bool = False) -> list[list[ClientGroup]]:
        """The groups of each rank, restricted to the given clients and cut where these are too many for a call.

        Args:
            clients: ascending ids.
            tested: they are spread by the work of testing instead of training. A client with a home stays there.
        """
        ranks: list[list[ClientGroup]] = [[] for _ in range(self.ranks)]
        if not len(clients):
            return ranks
        ordered = clients[np.argsort(self.group_of[clients], kind="stable")]
        first = np.flatnonzero(np.diff(self.group_of[ordered], prepend=-1))
        place = np.arange(len(ordered)) - np.repeat(first, np.diff(first, append=len(ordered)))
        starts = np.flatnonzero(place % (self.most_tested if tested else self.most) == 0)
        parts = [ordered[start:end] for start, end in zip(starts, [*starts[1:], len(ordered)], strict=True)]
        if self.home is not None:
            for rank, part in zip(self.home[ordered[starts]], parts, strict=True):
                ranks[rank].append(part)
            return ranks
        cost = np.add.reduceat((self.test_work if tested else self.work)[ordered], starts)
        for rank, call in assign_longest_first(cost, ordered[starts], self.computing_ranks):
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
        """The given clients by the rank that their state lives on; none where clients keep nothing."""
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
    executor: Executor, declared: Declared, templates: Sequence[Tree], runtime: RuntimeConfig, ranks: int, slots: int
) -> Placement:
    """Cut the clients into groups, and give each a home rank unless it keeps nothing and gets no message of its own.

    Args:
        executor: knows the clients and their data.
        templates: one per cohort, what a client keeps.
        runtime: settings, with `lanes` decided.
        slots: how many ranks can compute at once.
    """
    training, federation = executor.tasks[0].training, executor.federation
    n = federation.num_clients
    steps = count_round_steps(training, federation.num_train)
    lanes = runtime.lanes or 1
    groups, most = cut_groups(executor.cohort, steps, lanes), max(MAX_TOGETHER, int(lanes * training.participation))
    computing = choose_computing_ranks(runtime.server, ranks, n, slots)
    sample_work = compute_relative_flops(executor.tasks)[executor.cohort]
    work = 3.0 * steps * training.batch_size * sample_work  # forward, and twice as much backward
    test_work = federation.num_test * sample_work
    # Of very many small models more are tested in one call, which costs as much as the arithmetic of some hundred.
    model_bytes = max(tree.num_bytes(task.like()) for task in executor.tasks)
    most_tested = max(most, min(n // _MIN_TEST_CALLS, _MAX_TEST_BYTES // model_bytes))
    placement = Placement(ranks, groups, most, None, computing, work, test_work, most_tested)
    if not any(templates) and all(type(kind) is Shared for kind in declared.down.values()):
        return placement
    cost = np.zeros((len(groups), min(max(training.rounds, 1), _MAX_ROUNDS)))
    for round in range(cost.shape[1]):
        chosen = executor.participation.participants(round + 1)
        np.add.at(cost[:, round], placement.group_of[chosen], work[chosen] + test_work[chosen])
    if executor.algorithm.predicts_with:
        cost += np.bincount(placement.group_of, test_work, len(groups))[:, None]
    return replace(placement, home=place_clients(groups, cost, computing))


def count_round_steps(training: TrainingConfig, num_train: np.ndarray) -> np.ndarray:
    """[N] int64, local steps of clients with so many training samples [N]."""
    sizes, which = np.unique(num_train, return_inverse=True)
    return np.array([training.num_steps(int(samples)) for samples in sizes], np.int64)[which]


def compute_relative_flops(tasks: Sequence[Task]) -> np.ndarray:
    """[C] floating-point operations of a forward pass in each cohort, the cheapest counting 100; 1 if there is but one.

    Whole numbers, so that their sums are the same in any order, on every rank.
    """
    if len(tasks) == 1:
        return np.ones(1)
    from torch.utils.flop_counter import FlopCounterMode  # here: a fifth of a second, for clients with unlike models

    flops = np.empty(len(tasks))
    for number, task in enumerate(tasks):
        host = task.replace(device=HOST)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            host.predict(host.init(), torch.zeros(1, *task.architecture.shape))
        flops[number] = max(counter.get_total_flops(), 1)
    relative: np.ndarray = np.rint(100 * flops / flops.min())
    return relative


def cut_groups(cohort: np.ndarray, steps: np.ndarray, lanes: int) -> tuple[ClientGroup, ...]:
    """Groups of at most `lanes` clients of one cohort; those with similar numbers of steps are together.

    The cut depends on the clients alone, never on ranks: the lanes of a call decide its bits.

    Args:
        cohort: [N] the cohort of each client.
        steps: [N] local steps per round; a call lasts as long as its longest lane.
    """
    groups = []
    for which in np.unique(cohort):
        members = np.flatnonzero(cohort == which)
        members = members[np.argsort(steps[members], kind="stable")]
        count = -(-len(members) // lanes)
        groups += [np.sort(chunk).astype(np.int64) for chunk in np.array_split(members, count)]
    return tuple(groups)


def choose_computing_ranks(server: str, ranks: int, clients: int, slots: int) -> tuple[int, ...]:
    """The ranks that compute clients.

    Args:
        server: `shared` (rank 0 computes too), `dedicated` (it serves only) or `auto`: dedicated in the classic
            layout of one client per rank, and where there are more ranks than can compute at once.
        slots: how many ranks can compute at once on all nodes.
    """
    dedicated = server == "dedicated" or (server == "auto" and (ranks == clients + 1 or ranks > slots))
    return tuple(range(1, ranks)) if dedicated and ranks > 1 else tuple(range(ranks))


def assign_longest_first(cost: np.ndarray, clients: np.ndarray, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The rank of each call with its place, longest first: each goes to the rank with the least to do.

    Args:
        cost: [C] of each call, whole numbers.
        clients: [C] the first client of each, which decides between calls of the same cost.

    >>> assign_longest_first(np.array([2, 3, 2, 1]), np.arange(4), [0, 1])
    [(0, 1), (1, 0), (1, 2), (0, 3)]
    """
    loads, assigned = [(0.0, rank) for rank in ranks], []
    for call in np.lexsort((clients, -cost)).tolist():
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + float(cost[call]), rank))
        assigned.append((rank, call))
    return assigned


def place_clients(
    groups: Sequence[ClientGroup], work: np.ndarray, ranks: Sequence[int], searched: int = _MAX_COMPARED
) -> np.ndarray:
    """The home rank [N] of every client, chosen so that the slowest rank of each round has the least to do.

    Who takes part in which round is known from the seed, so the placement can look at all of it. The group with the
    most work comes first; each goes where it makes all rounds together the least longer, of equal ranks to the one with
    the least work, then to the first.

    Args:
        groups: the groups; one stays together.
        work: [G, T] cost of each group in each round: whole numbers, so that sums are exact in any order.
        searched: rounds of a group times ranks that are compared for it; of more, those ranks with the least work.
    """
    home = np.full(sum(map(len, groups)), -1, np.int64)
    load, slowest, longest = np.zeros((len(ranks), work.shape[1])), np.zeros(work.shape[1]), 0.0
    least = [(0.0, place) for place in range(len(ranks))]  # ascending; work of each rank in all rounds
    total = work.sum(1)
    for index in np.lexsort(([group[0] for group in groups], -total)):
        cost = work[index]
        rounds = np.flatnonzero(cost)
        cost, most = cost[rounds], max(_FIRST_COMPARED, searched // max(len(rounds), 1))
        best, longer, start = 0, np.inf, 0
        # A rank makes the rounds longer at least by the work that does not fit below the slowest ones.
        while start < min(most, len(least)) and max(least[start][0] + total[index] - longest, 0.0) < longer:
            compared = np.array([place for _, place in least[start : min(2 * start + _FIRST_COMPARED, most)]])
            added = np.maximum(load[np.ix_(compared, rounds)] + (cost - slowest[rounds]), 0).sum(1)
            if added.min() < longer:
                best, longer = start + int(added.argmin()), float(added.min())
            start += len(compared)
        before, place = least.pop(best)
        bisect.insort(least, (before + float(total[index]), place))
        load[place, rounds] += cost
        slowest[rounds] = np.maximum(slowest[rounds], load[place, rounds])
        longest += longer
        home[groups[index]] = ranks[place]
    return home
