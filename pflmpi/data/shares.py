"""Whole samples from fractional shares: the rounding that partitions, splits and limits share."""

import numpy as np


def apportion(total: int, weights: np.ndarray, floor: int = 0) -> np.ndarray:
    """Counts int64 [M] that sum to `total`, in proportion to the weights [M] (largest remainders).

    Each gets `floor` first and then a share of the rest. Equal remainders go to the lower index; weights that are all
    zero count as equal. A weight of zero among others gets nothing beyond the floor.

    >>> apportion(10, np.array([1.0, 1.0, 2.0]))
    array([3, 2, 5])
    """
    rest = total - floor * len(weights)
    assert rest >= 0, f"{total} samples cannot give {floor} to each of {len(weights)}"
    weights = np.asarray(weights, dtype=np.float64)
    if weights.sum() <= 0:
        weights = np.ones(len(weights))
    quotas = weights / weights.sum() * rest
    counts: np.ndarray = np.floor(quotas).astype(np.int64)
    largest_first = np.argsort(counts - quotas, kind="stable")
    counts[largest_first[: rest - int(counts.sum())]] += 1
    return counts + floor


def cut(samples: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Consecutive pieces of `samples` with the given lengths; the rest is dropped."""
    return np.split(samples, np.cumsum(counts))[: len(counts)]


def merged(pieces: list[np.ndarray]) -> np.ndarray:
    """The samples of all pieces as one ascending int64 array; no pieces give an empty one."""
    return np.sort(np.concatenate([np.empty(0, np.int64), *pieces]).astype(np.int64))
