"""What the tests of partitions have in common."""

import numpy as np


def rng(seed=0):
    return np.random.Generator(np.random.Philox(key=seed))


def counts_of(parts, labels):
    """Return int64 [N, K]."""
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])
