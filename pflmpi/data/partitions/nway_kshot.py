"""About n labels for each client, and about k samples of each."""

from typing import Annotated

import numpy as np
from pydantic import Field

from pflmpi.data.partitions.by_label import count_classes
from pflmpi.data.splits import merge
from pflmpi.errors import DataError


def nway_kshot(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    n: Annotated[int, Field(ge=1, description="labels of a client, on average")],
    k: Annotated[int, Field(ge=1, description="samples of each label that a client holds, on average")] = 100,
    stdev: Annotated[int, Field(ge=0, description="labels more or less than n")] = 2,
    noise: Annotated[int, Field(ge=0, description="samples more or less than k")] = 2,
) -> list[np.ndarray]:
    """About n labels for each client and about k samples of each.

    Not complete, and disjoint while the pool lasts.

    A client's number of labels is uniform from max(2, n - stdev) to min(K, n + stdev), as in FedProto's code, whose
    setting pFedPM adopts (1 is possible for n = 1; stdev is 2 for MNIST, 1 for FEMNIST and CIFAR-10); the labels are
    drawn without replacement. For each of them, uniform from k - noise to k + noise samples are drawn. The paper says
    "random noise" and gives no distribution.

    Samples come from a shuffled pool for each class. A pool that runs out is shuffled and used again: from then on
    clients share samples (logged, and counted by `Federation.num_shared`), but no client gets one twice.
    `k` counts the samples before a client's own train/test split; with `data.split: official` all are training samples.
    """
    classes, sizes = count_classes(labels, clients)
    if n > len(classes):
        raise DataError(f"partition.n = {n}, but the data has {len(classes)} classes; allowed are 1..{len(classes)}")
    low, high = max(min(2, n), n - stdev), min(len(classes), n + stdev)
    smallest = int(np.argmin(sizes))
    if k + noise > sizes[smallest]:
        raise DataError(
            f"partition.k + partition.noise = {k} + {noise} samples of one label, but class {classes[smallest]} has "
            f"{sizes[smallest]}; lower partition.k to at most {sizes[smallest] - noise}"
        )
    if k - noise < 1:
        raise DataError(
            f"partition.noise = {noise} with partition.k = {k} can leave a label empty; allowed are 0..{k - 1}"
        )
    pools = [_Pool(np.flatnonzero(labels == label), rng) for label in classes]
    result = []
    for _ in range(clients):
        ways = rng.integers(low, high + 1)
        chosen = np.sort(rng.choice(len(classes), size=ways, replace=False))
        result.append(merge([pools[column].take(int(rng.integers(k - noise, k + noise + 1))) for column in chosen]))
    return result


class _Pool:
    """The samples of one class, given out in random order; when none is left, all of them in a new order."""

    def __init__(self, samples: np.ndarray, rng: np.random.Generator) -> None:
        self._samples = samples
        self._rng = rng
        self._remaining = rng.permutation(samples)

    def take(self, count: int) -> np.ndarray:
        """Returns `count` distinct samples."""
        taken, self._remaining = self._remaining[:count], self._remaining[count:]
        short = count - len(taken)
        if short:
            refill = self._rng.permutation(self._samples)
            positions = np.flatnonzero(~np.isin(refill, taken))[:short]  # none that this client was just given
            taken = np.concatenate([taken, refill[positions]])
            self._remaining = np.delete(refill, positions)
        return taken
