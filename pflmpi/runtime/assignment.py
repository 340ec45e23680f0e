"""Which rank computes what, so that the slowest has the least to do."""

import bisect
import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pflmpi.messages.groups import ClientGroup

_SEARCHED = 2**15  # loads that are compared for the home of a client
_AT_ONCE = 32  # hosts, at first
_WORTH = 0.9  # of the time: what clients are moved for
T = TypeVar("T")


def longest_first(cost: np.ndarray, clients: np.ndarray, hosts: Sequence[int]) -> list[tuple[int, int]]:
    """The rank of each call with its place, longest first: each goes to the rank with the least to do.

    Args:
        cost: [C] of each call, whole numbers.
        clients: [C] the first client of each, which decides between calls of the same cost.
        hosts: ranks to spread over.

    >>> longest_first(np.array([2, 3, 2, 1]), np.arange(4), [0, 1])
    [(0, 1), (1, 0), (1, 2), (0, 3)]
    """
    loads, found = [(0.0, rank) for rank in hosts], []
    for call in np.lexsort((clients, -cost)).tolist():
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + float(cost[call]), rank))
        found.append((rank, call))
    return found


def in_microseconds(work: np.ndarray, pace: np.ndarray) -> np.ndarray:
    """Work as the time that it takes, in whole numbers, so that sums are exact in any order."""
    found: np.ndarray = np.rint(work * pace)
    return found


def clearly_quicker(usual: T, measured: T, seconds: Callable[[T], float]) -> T:
    """The way by measured work where it saves a tenth of the time at least: else ranks do what `plan` says."""
    return measured if seconds(measured) <= _WORTH * seconds(usual) else usual


def makespan(assigned: Sequence[tuple[int, int]], cost: np.ndarray) -> float:
    """The cost of the rank that has the most, from `longest_first`."""
    ranks, calls = np.array(assigned).T
    return float(np.bincount(ranks, cost[calls]).max())


def total_makespan(home: np.ndarray, cost: np.ndarray) -> float:
    """The cost of the slowest rank of each round, of all rounds.

    Args:
        home: [N] the rank of each client.
        cost: [N, T] of each client in each round.
    """
    loads = np.zeros((int(home.max()) + 1, cost.shape[1]))
    np.add.at(loads, home, cost)
    return float(loads.max(0).sum())


def place_clients(
    groups: Sequence[ClientGroup], work: np.ndarray, hosts: Sequence[int], searched: int = _SEARCHED
) -> np.ndarray:
    """The home rank [N] of every client, chosen so that the slowest rank of each round has the least to do.

    Who takes part in which round is known from the seed, so the placement can look at all of it. The group with the
    most work comes first; each goes where it makes all rounds together the least longer, of equal hosts to the one with
    the least work, then to the first.

    Args:
        groups: the groups; one stays together.
        work: [N, T] cost of each client in each round: whole numbers, so that sums are exact in any order.
        hosts: ranks to spread over.
        searched: rounds of a group times hosts that are compared for it; of more, those hosts with the least work.
    """
    home = np.full(len(work), -1, np.int64)
    load, slowest, longest = np.zeros((len(hosts), work.shape[1])), np.zeros(work.shape[1]), 0.0
    least = [(0.0, host) for host in range(len(hosts))]  # ascending; work of each host in all rounds
    whole = np.array([work[group].sum() for group in groups])
    for index in np.lexsort(([group[0] for group in groups], -whole)):
        cost = work[groups[index]].sum(0)
        rounds = np.flatnonzero(cost)
        cost, most = cost[rounds], max(_AT_ONCE, searched // max(len(rounds), 1))
        best, longer, start = 0, np.inf, 0
        # A host makes the rounds longer at least by the work that does not fit below the slowest ones.
        while start < min(most, len(least)) and max(least[start][0] + whole[index] - longest, 0.0) < longer:
            some = np.array([host for _, host in least[start : min(2 * start + _AT_ONCE, most)]])
            added = np.maximum(load[np.ix_(some, rounds)] + (cost - slowest[rounds]), 0).sum(1)
            if added.min() < longer:
                best, longer = start + int(added.argmin()), float(added.min())
            start += len(some)
        total, host = least.pop(best)
        bisect.insort(least, (total + float(whole[index]), host))
        load[host, rounds] += cost
        slowest[rounds] = np.maximum(slowest[rounds], load[host, rounds])
        longest += longer
        home[groups[index]] = hosts[host]
    return home
