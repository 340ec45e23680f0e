"""Placement of clients on ranks, in groups, which balances the work of ranks.

Results never depend on it, and it never depends on measured times.
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

MAX_TOGETHER = 32  # clients in one call, unless more are configured
_MAX_ROUNDS = 1000  # home ranks are chosen by the work of the first rounds, at most so many
_MAX_COMPARED = 2**15  # loads (ranks times rounds) that are compared to choose the home of a group
_FIRST_COMPARED = 32  # ranks that are compared first
_MIN_TEST_CALLS = 1024  # calls that test all clients are not merged into fewer than this
_MAX_TEST_BYTES = 2**26  # bytes of the models in one such call


@dataclass(frozen=True)
class Placement:
    """Groups of clients, and the home rank of each client.

    Attributes:
        groups: groups of clients of one cohort; those that take part in a round are computed together.
        max_clients: clients in one call; a group with more participants needs several calls.
        max_tested: likewise in a call that tests.
        home: [N] the rank with each client's state, or None if clients have no state and may be computed anywhere.
        computing_ranks: the ranks that compute clients.
        work: [N] relative cost of training in one round, whole numbers.
        test_work: [N] relative cost of testing, in the same unit.
    """

    ranks: int
    groups: tuple[ClientGroup, ...]
    max_clients: int
    home: np.ndarray | None
    computing_ranks: tuple[int, ...]
    work: np.ndarray
    test_work: np.ndarray
    max_tested: int = MAX_TOGETHER

    def assign(self, clients: np.ndarray, tested: bool = False) -> list[list[ClientGroup]]:
        """Assigns clients to ranks; returns each rank's groups, cut to the size of a call.

        Clients with a home are computed there; others go to the ranks with the least work.

        Args:
            clients: ascending ids.
            tested: whether clients are tested instead of trained, which has other costs.
        """
        ranks: list[list[ClientGroup]] = [[] for _ in range(self.ranks)]
        if not len(clients):
            return ranks
        ordered = clients[np.argsort(self.group_of[clients], kind="stable")]
        first = np.flatnonzero(np.diff(self.group_of[ordered], prepend=-1))
        number_in_group = np.arange(len(ordered)) - np.repeat(first, np.diff(first, append=len(ordered)))
        starts = np.flatnonzero(number_in_group % (self.max_tested if tested else self.max_clients) == 0)
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
        """The given clients by home rank; empty if clients have no state."""
        if self.home is None:
            return [clients[:0]] * self.ranks
        clients = clients[np.argsort(self.home[clients], kind="stable")]
        ends = np.searchsorted(self.home[clients], np.arange(self.ranks + 1)).tolist()
        return [clients[slice(*ends[rank : rank + 2])] for rank in range(self.ranks)]

    def hosted(self, rank: int) -> np.ndarray:
        """Ascending ids of the clients with this home rank."""
        if self.home is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.home == rank).astype(np.int64)


def make_placement(
    executor: Executor, declared: Declared, templates: Sequence[Tree], runtime: RuntimeConfig, ranks: int, slots: int
) -> Placement:
    """Cuts the clients into groups, and gives them home ranks if they have state or receive messages of their own.

    Args:
        executor: has the clients and their data.
        templates: one per cohort, the state of a client.
        runtime: settings, with `lanes` decided.
        slots: how many ranks can compute at once.
    """
    training, federation = executor.tasks[0].training, executor.federation
    n = federation.num_clients
    steps = count_round_steps(training, federation.num_train)
    lanes = runtime.lanes or 1
    groups = cut_groups(executor.cohort, steps, lanes)
    max_clients = max(MAX_TOGETHER, int(lanes * training.participation))
    computing = choose_computing_ranks(runtime.server, ranks, n, slots)
    sample_work = compute_relative_flops(executor.tasks, federation.dataset.images[:1])[executor.cohort]
    work = 3.0 * steps * training.batch_size * sample_work  # forward, and twice as much backward
    test_work = federation.num_test * sample_work
    # A call costs as much as the arithmetic of some hundred small models, so very many of them share a call.
    model_bytes = max(tree.num_bytes(task.like()) for task in executor.tasks)
    max_tested = max(max_clients, min(n // _MIN_TEST_CALLS, _MAX_TEST_BYTES // model_bytes))
    placement = Placement(ranks, groups, max_clients, None, computing, work, test_work, max_tested)
    if not any(templates) and all(type(kind) is Shared for kind in declared.down.values()):
        return placement
    cost = np.zeros((len(groups), min(max(training.rounds, 1), _MAX_ROUNDS)))
    for round in range(cost.shape[1]):
        participants = executor.participation.participants(round + 1)
        np.add.at(cost[:, round], placement.group_of[participants], work[participants] + test_work[participants])
    if executor.algorithm.predicts_with:
        cost += np.bincount(placement.group_of, test_work, len(groups))[:, None]
    return replace(placement, home=place_clients(groups, cost, computing))


def count_round_steps(training: TrainingConfig, num_train: np.ndarray) -> np.ndarray:
    """Returns [N] int64, the local steps of clients with `num_train` [N] samples."""
    sizes, inverse = np.unique(num_train, return_inverse=True)
    return np.array([training.num_steps(int(samples)) for samples in sizes], np.int64)[inverse]


def compute_relative_flops(tasks: Sequence[Task], images: np.ndarray) -> np.ndarray:
    """Returns [C] the operations of a forward pass in each cohort, relative to 100 for the cheapest; 1 for one cohort.

    Whole numbers, so that their sums are the same in any order, on every rank.

    Args:
        images: a sample of the data, since a module may refuse made-up ones.
    """
    if len(tasks) == 1:
        return np.ones(1)
    from torch.utils.flop_counter import FlopCounterMode  # imported here, because it takes 0.2 s

    flops = np.empty(len(tasks))
    for number, task in enumerate(tasks):
        host = task.replace(device=HOST)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            host.predict(host.init(), host.prepare(torch.tensor(images)))
        flops[number] = max(counter.get_total_flops(), 1)
    relative: np.ndarray = np.rint(100 * flops / flops.min())
    return relative


def cut_groups(cohort: np.ndarray, steps: np.ndarray, lanes: int) -> tuple[ClientGroup, ...]:
    """Cuts the clients into groups of at most `lanes` of one cohort, with similar numbers of steps.

    The groups depend on the clients alone, never on ranks, because the lanes of a call affect its bits.

    Args:
        cohort: [N] the cohort of each client.
        steps: [N] local steps per round; a call lasts as long as its longest lane.
    """
    groups = []
    for number in np.unique(cohort):
        members = np.flatnonzero(cohort == number)
        members = members[np.argsort(steps[members], kind="stable")]
        count = -(-len(members) // lanes)
        groups += [np.sort(chunk).astype(np.int64) for chunk in np.array_split(members, count)]
    return tuple(groups)


def choose_computing_ranks(server: str, ranks: int, clients: int, slots: int) -> tuple[int, ...]:
    """Returns the ranks that compute clients.

    Args:
        server: `shared` (rank 0 computes too), `dedicated` (it serves only) or `auto`: dedicated in the classic
            layout of one client per rank, and where there are more ranks than can compute at once.
        slots: how many ranks can compute at once on all nodes.
    """
    dedicated = server == "dedicated" or (server == "auto" and (ranks == clients + 1 or ranks > slots))
    return tuple(range(1, ranks)) if dedicated and ranks > 1 else tuple(range(ranks))


def assign_longest_first(cost: np.ndarray, clients: np.ndarray, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Assigns calls to ranks, longest first, each to the rank with the least work; returns (rank, call) pairs.

    Args:
        cost: [C] cost of each call, whole numbers.
        clients: [C] the first client of each call, which breaks ties of cost.

    >>> assign_longest_first(np.array([2, 3, 2, 1]), np.arange(4), [0, 1])
    [(0, 1), (1, 0), (1, 2), (0, 3)]
    """
    loads, assigned = [(0.0, rank) for rank in ranks], []
    for call in np.lexsort((clients, -cost)).tolist():
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + float(cost[call]), rank))
        assigned.append((rank, call))
    return assigned


def place_clients(groups: Sequence[ClientGroup], work: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
    """Chooses the home rank [N] of each client, so that the slowest rank of each round has little work.

    The seed fixes who takes part in which round, so the work of all rounds is known. Groups are placed greedily, those
    with the most work first, each on the rank where it prolongs all rounds together the least; ties go to the rank with
    the least total work, then to the first. With many ranks and rounds, only ranks with little total work are compared.

    Args:
        groups: groups of clients, each of which stays together.
        work: [G, T] cost of each group in each round: whole numbers, so that sums are exact in any order.
    """
    home = np.full(sum(map(len, groups)), -1, np.int64)
    load, slowest, longest = np.zeros((len(ranks), work.shape[1])), np.zeros(work.shape[1]), 0.0
    by_total = [(0.0, position) for position in range(len(ranks))]  # ascending total work, and position in `ranks`
    total = work.sum(1)
    for index in np.lexsort(([group[0] for group in groups], -total)):
        cost = work[index]
        rounds = np.flatnonzero(cost)
        cost, limit = cost[rounds], max(_FIRST_COMPARED, _MAX_COMPARED // max(len(rounds), 1))
        best, prolonged, start = 0, np.inf, 0
        # A lower bound: work that does not fit under the slowest ranks of all rounds prolongs them.
        while start < min(limit, len(by_total)) and max(by_total[start][0] + total[index] - longest, 0.0) < prolonged:
            compared = np.array([position for _, position in by_total[start : min(2 * start + _FIRST_COMPARED, limit)]])
            added = np.maximum(load[np.ix_(compared, rounds)] + (cost - slowest[rounds]), 0).sum(1)
            if added.min() < prolonged:
                best, prolonged = start + int(added.argmin()), float(added.min())
            start += len(compared)
        before, position = by_total.pop(best)
        bisect.insort(by_total, (before + float(total[index]), position))
        load[position, rounds] += cost
        slowest[rounds] = np.maximum(slowest[rounds], load[position, rounds])
        longest += prolonged
        home[groups[index]] = ranks[position]
    return home
