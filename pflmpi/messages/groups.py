"""Groups of clients: those of one cohort that a rank computes in one call."""

from collections.abc import Sequence

import numpy as np

ClientGroup = np.ndarray  # ascending client ids that are computed in one call

_NOBODY = np.empty(0, np.int64)  # of most ranks, where there are many


def clients_of(groups: Sequence[ClientGroup]) -> np.ndarray:
    """The ascending ids of all clients in some groups; only to be read, as they may be a group itself."""
    if len(groups) == 1:
        return groups[0]
    return np.sort(np.concatenate(groups)) if len(groups) else _NOBODY


def clients_per_rank(assigned: Sequence[Sequence[ClientGroup]]) -> np.ndarray:
    """[R] how many clients are in the groups of each rank."""
    return np.array([sum(map(len, groups)) if groups else 0 for groups in assigned], np.int64)


def rank_by_rank(assigned: Sequence[Sequence[ClientGroup]]) -> np.ndarray:
    """The ids of the clients of all ranks, those of a rank after those of the one before, and ascending in each.

    >>> rank_by_rank([[np.array([3, 5]), np.array([4])], [], [np.array([1])]]).tolist()
    [3, 4, 5, 1]
    """
    return np.concatenate([clients_of(groups) for groups in assigned])


def clients_of_all(assigned: Sequence[Sequence[ClientGroup]]) -> np.ndarray:
    """The ascending ids of the clients of all ranks, of which each has some groups."""
    return clients_of([group for groups in assigned for group in groups])
