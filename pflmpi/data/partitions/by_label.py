"""Steps of the partitions by label: check the numbers, deal labels to clients, cut classes, assign samples."""

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from pflmpi.data.splits import apportion, divide_by_class
from pflmpi.errors import DataError

Pairing = Annotated[
    Literal["random", "contiguous", "cyclic"],
    Field(
        description="which labels a client holds: dealt at random; contiguous groups of labels in turn, with 2 of 10 "
        "(0, 1), (2, 3) and so on; or cyclic, those from its own number on"
    ),
]


def count_classes(labels: np.ndarray, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the labels that occur [K] and how often [K]; `DataError` for no client, or fewer samples than clients."""
    require_samples(len(labels), clients)
    classes, sizes = np.unique(labels, return_counts=True)
    return classes, sizes.astype(np.int64)


def draw_holders(
    clients: int, classes_per_client: int, num_classes: int, max_tries: int, draw: Callable[[], np.ndarray]
) -> np.ndarray:
    """Draws distinct labels [N, C] until each label has at least half its mean number of holders.

    Returns:
        bool [N, K], which clients hold which labels.

    Raises:
        DataError: impossible numbers, or no such draw among `max_tries`.
    """
    require_classes(clients, classes_per_client, num_classes)
    needed = max(1, classes_per_client * clients // num_classes // 2)
    for _ in range(max_tries):
        holds = np.zeros((clients, num_classes), dtype=bool)
        np.put_along_axis(holds, draw(), True, axis=1)
        if holds.sum(axis=0).min() >= needed:
            return holds
    raise DataError(
        f"{max_tries} draws of {classes_per_client} labels for each of {clients} clients gave no set in which each of "
        f"{num_classes} labels has {needed} holders; raise partition.classes_per_client, partition.clients or "
        f"partition.max_tries, or use the partition 'pathological', which deals the labels"
    )


def require_samples(samples: int, clients: int, each: int = 1) -> None:
    """Raises `DataError` unless every client can have `each` samples."""
    if clients < 1:
        raise DataError(f"partition.clients = {clients}: at least one client is needed")
    if samples < clients * each:
        raise DataError(
            f"{clients} clients with at least {each} samples each need {clients * each} samples, the data has "
            f"{samples}; lower partition.clients{' or min_samples' if each > 1 else ''}, or use more data"
        )


def require_classes(clients: int, classes_per_client: int, num_classes: int) -> None:
    """Raises `DataError` unless clients can hold that many classes each and, together, every class."""
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


def deal_labels(
    clients: int,
    classes_per_client: int,
    num_classes: int,
    rng: np.random.Generator,
    pairing: Literal["random", "contiguous", "cyclic"],
) -> np.ndarray:
    """Deals exactly `classes_per_client` (C) labels to every client, so that every label has a holder.

    random: each client takes the labels with the fewest holders so far, at random among equals. contiguous: client i
    has the labels i C + j modulo K for j < C. With both the numbers of holders differ by at most one. cyclic: client
    i has the labels i + j modulo K.

    Returns:
        bool [N, K], which clients hold which labels.

    Raises:
        DataError: more classes per client than there are, or too few to cover all.
    """
    require_classes(clients, classes_per_client, num_classes)
    holds = np.zeros((clients, num_classes), dtype=bool)
    if pairing != "random":
        first = np.arange(clients) * (classes_per_client if pairing == "contiguous" else 1)
        columns = (first[:, None] + np.arange(classes_per_client)) % num_classes
        holds[np.arange(clients)[:, None], columns] = True
        if missing := np.flatnonzero(~holds.any(axis=0)).tolist():
            raise DataError(
                f"partition.pairing = {pairing!r}: {clients} clients leave class number {missing[0]} without a holder; "
                "raise partition.clients, or use another pairing"
            )
        return holds
    for client in range(clients):
        shuffled = rng.permutation(num_classes)
        fewest_first = shuffled[np.argsort(holds.sum(axis=0)[shuffled], kind="stable")]
        holds[client, fewest_first[:classes_per_client]] = True
    return holds


def draw_uneven_weights(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws weights between 0.1 and 1: the largest of unevenly cut pieces is at most ten times the smallest."""
    return rng.uniform(0.1, 1.0, shape)


def cut_classes(
    classes: np.ndarray, sizes: np.ndarray, holds: np.ndarray, weights: np.ndarray, floor: int
) -> np.ndarray:
    """Cuts every class among its holders, `floor` samples each and the rest by weight; returns counts int64 [N, K].

    Args:
        classes: the labels that occur [K], for messages.
        sizes: samples of each [K].
        holds: bool [N, K].
        weights: positive [N, K]; ignored for clients that do not hold the class.
        floor: samples of the class that every holder gets.

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


def assign_samples(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffles the samples of each class and cuts them by `counts`; returns each client's ascending sample indices.

    Args:
        labels: int64 [n].
        counts: int64 [N, K] for the K labels that occur, ascending; columns sum to at most the size of the class.
    """
    samples = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    return divide_by_class(samples, counts)
