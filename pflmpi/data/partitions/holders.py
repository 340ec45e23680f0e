"""Which client holds which label, dealt so that all labels have the same number of holders, give or take one."""

import numpy as np

from pflmpi.data.partitions.counts import require_classes
from pflmpi.data.shares import apportion
from pflmpi.errors import DataError


def deal_labels(clients: int, classes_per_client: int, num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Return bool [N, K], with exactly `classes_per_client` labels in every row.

    Each client takes the labels with the fewest holders so far, at random among equals; so the numbers of holders
    differ by at most one, and every label has a holder.

    Raises:
        DataError: more classes per client than there are, or too few to cover all.
    """
    require_classes(clients, classes_per_client, num_classes)
    holds = np.zeros((clients, num_classes), dtype=bool)
    for client in range(clients):
        shuffled = rng.permutation(num_classes)
        fewest_first = shuffled[np.argsort(holds.sum(axis=0)[shuffled], kind="stable")]
        holds[client, fewest_first[:classes_per_client]] = True
    return holds


def share_out(classes: np.ndarray, sizes: np.ndarray, holds: np.ndarray, weights: np.ndarray, floor: int) -> np.ndarray:
    """Return int64 counts [N, K]: every class cut among its holders, `floor` samples each and the rest by weight.

    Args:
        classes: the labels that occur [K], for messages.
        sizes: samples of each [K].
        holds: bool [N, K].
        weights: positive [N, K]; entries of clients that do not hold the class are not looked at.
        floor: samples that every holder gets of the class.

    Raises:
        DataError: a class with too few samples for the floor.
    """
    counts = np.zeros(holds.shape, dtype=np.int64)
    for column, (label, size) in enumerate(zip(classes, sizes, strict=True)):
        holders = np.flatnonzero(holds[:, column])
        if size < floor * len(holders):
            raise DataError(
                f"class {label} has {size} samples for {len(holders)} clients that hold it, at least {floor} each are "
                f"needed; lower partition.clients, partition.classes_per_client"
                f"{' or partition.min_samples' if floor > 1 else ''}, or use more data"
            )
        counts[holders, column] = apportion(int(size), weights[holders, column], floor)
    return counts


def uneven(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return weights between 0.1 and 1: the largest of the unevenly cut pieces is at most ten times the smallest."""
    return rng.uniform(0.1, 1.0, shape)
