"""Groups of clients, of one cohort each, that a rank computes in one call."""

from collections.abc import Sequence

import numpy as np

ClientGroup = np.ndarray  # ascending client ids that are computed in one call

_NO_CLIENTS = np.empty(0, np.int64)  # of most ranks, where there are many


def clients_of(groups: Sequence[ClientGroup]) -> np.ndarray:
    """Returns the ascending ids of all clients in some groups; must not be modified, as it may be one of the groups."""
    if len(groups) == 1:
        return groups[0]
    return np.sort(np.concatenate(groups)) if len(groups) else _NO_CLIENTS


def clients_per_rank(assigned: Sequence[Sequence[ClientGroup]]) -> np.ndarray:
    """Counts the clients in the groups of each rank, [R]."""
    return np.array([sum(map(len, groups)) for groups in assigned], np.int64)


def clients_by_rank(assigned: Sequence[Sequence[ClientGroup]]) -> np.ndarray:
    """Returns the ids of the clients of all ranks, in the order of the ranks, and ascending in each.

    >>> clients_by_rank([[np.array([3, 5]), np.array([4])], [], [np.array([1])]]).tolist()
    [3, 4, 5, 1]
    """
    return np.concatenate([clients_of(groups) for groups in assigned])


def clients_of_all(assigned: Sequence[Sequence[ClientGroup]]) -> np.ndarray:
    """Returns the ascending ids of the clients of all ranks, given the groups of each."""
    return clients_of([group for groups in assigned for group in groups])
