"""What the partitions by label have in common: the preconditions, and handing out counted samples."""

import numpy as np

from pflmpi.data.shares import cut, together
from pflmpi.errors import DataError


def class_sizes(labels: np.ndarray, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels that occur [K] and how often [K]; K counts those, not the ones a dataset could have.

    Raises:
        DataError: no client, or fewer samples than clients.
    """
    require_samples(len(labels), clients)
    classes, sizes = np.unique(labels, return_counts=True)
    return classes, sizes.astype(np.int64)


def require_samples(samples: int, clients: int, each: int = 1) -> None:
    """Raise `DataError` unless every client can have `each` samples."""
    if clients < 1:
        raise DataError(f"partition.clients = {clients}: at least one client is needed")
    if samples < clients * each:
        raise DataError(
            f"{clients} clients with at least {each} samples each need {clients * each} samples, the data has "
            f"{samples}; lower partition.clients{' or min_samples' if each > 1 else ''}, or use more data"
        )


def require_classes(clients: int, classes_per_client: int, num_classes: int) -> None:
    """Raise `DataError` unless clients can hold that many classes each, and hold every class together."""
    if classes_per_client > num_classes:
        raise DataError(
            f"partition.classes_per_client = {classes_per_client}, but the data has {num_classes} classes; "
            f"allowed are 1..{num_classes}"
        )
    if clients * classes_per_client < num_classes:
        raise DataError(
            f"{clients} clients with {classes_per_client} classes each hold {clients * classes_per_client} classes at "
            f"most, the data has {num_classes}; raise partition.clients or partition.classes_per_client"
        )


def hand_out(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle the samples of each class and give every client as many as counted.

    Args:
        labels: int64 [n].
        counts: int64 [N, K] for the K labels that occur, ascending; columns sum to at most the size of the class.
        rng: shuffles, class by class.

    Returns:
        The ascending sample indices of each of the N clients.
    """
    pieces: list[list[np.ndarray]] = [[] for _ in range(len(counts))]
    for column, label in enumerate(np.unique(labels)):
        samples = rng.permutation(np.flatnonzero(labels == label))
        for own, piece in zip(pieces, cut(samples, counts[:, column]), strict=True):
            own.append(piece)
    return [together(own) for own in pieces]
