"""How long the clients train: measured in the rounds so far, so that ranks get as much to do as each other."""

import numpy as np

_KEPT = 3  # measures of each client
_ENOUGH = 2  # of them, for a client to be placed by them: a single one may have caught the machine at other work


def unmeasured(num_clients: int) -> np.ndarray:
    """[N, 3] the seconds of each client before any was measured: NaN."""
    return np.full((num_clients, _KEPT), np.nan)


def measured(before: np.ndarray, clients: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """[N, 3] the newest measures of each client, newest first, after one more of some.

    >>> measured(measured(unmeasured(2), np.array([1]), np.array([0.5])), np.array([1]), np.array([0.25]))
    array([[ nan,  nan,  nan],
           [0.25, 0.5 ,  nan]])
    """
    after = before.copy()
    after[clients] = np.column_stack([seconds, before[clients, :-1]])
    return after


def pace(seconds: np.ndarray, work: np.ndarray) -> np.ndarray:
    """[N] microseconds of each client for a unit of work; all 0 as long as no client was measured often enough.

    A client takes the median of its measures (the lower one of two), and where it has too few as long for its work as
    the others together.

    Args:
        seconds: [N, 3] from `measured`.
        work: [N] of a round of training, whole numbers, so that all ranks come to the same.
    """
    known = np.isfinite(seconds).sum(1)
    enough = (known >= _ENOUGH) & (work > 0)
    if not enough.any():
        return np.zeros(len(work))
    median = np.sort(seconds)[np.arange(len(seconds)), (known - 1) // 2]  # NaN comes last
    microseconds = np.maximum(np.rint(1e6 * median[enough]), 1)
    found = np.full(len(work), microseconds.sum() / work[enough].sum())
    found[enough] = microseconds / work[enough]
    return found
