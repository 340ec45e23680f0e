"""A smaller dataset with the same classes, for quick runs."""

import numpy as np

from pflmpi.data.dataset import Dataset, assemble
from pflmpi.data.shares import apportion, together


def subset(dataset: Dataset, limit: int, rng: np.random.Generator) -> Dataset:
    """Return `limit` samples of a dataset in their old order, or the dataset itself where it has no more.

    The classes keep their proportions, and every class keeps a sample if `limit` allows it; inside a class the
    official training and test samples keep theirs, training first.
    """
    if limit >= len(dataset.labels):
        return dataset
    sizes = np.bincount(dataset.labels, minlength=dataset.num_classes)
    present = np.flatnonzero(sizes)
    # One sample for each class first and the rest by what is left of each: a class never gets more than it has.
    one = int(limit >= len(present))
    counts = apportion(limit, sizes[present] - one, floor=one)
    chosen = []
    for label, count in zip(present, counts, strict=True):
        member = dataset.labels == label
        sides = [rng.permutation(np.flatnonzero(member & (dataset.official_test == test))) for test in (False, True)]
        shares = apportion(int(count), np.array([len(side) for side in sides], dtype=np.float64))
        chosen += [side[:share] for side, share in zip(sides, shares, strict=True)]
    kept = together(chosen)
    writers = None if dataset.writers is None else dataset.writers[kept]
    return assemble(
        dataset.name,
        np.asarray(dataset.images[kept]),
        dataset.labels[kept],
        dataset.official_test[kept],
        dataset.num_classes,
        writers,
    )
