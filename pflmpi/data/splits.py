"""Splits the samples of each client into training, test and validation; rounds fractional shares to whole samples."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from pflmpi.errors import DataError


def apportion(total: int, weights: np.ndarray, floor: int = 0) -> np.ndarray:
    """Returns counts int64 [M] that sum to `total`, in proportion to the weights [M] (largest remainders).

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
    return _round_to_totals(quotas, np.array([rest]), np.zeros(len(weights), np.int64)) + floor


def _round_to_totals(quotas: np.ndarray, totals: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Rounds quotas [M] by largest remainders, so that those of each owner [M] (ascending) sum to its total [N]."""
    counts: np.ndarray = np.floor(quotas).astype(np.int64)
    remaining = totals - np.bincount(owner, counts, len(totals)).astype(np.int64)
    by_remainder = np.lexsort((counts - quotas, owner))  # largest first, owner by owner
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    counts[by_remainder[rank < remaining[owner]]] += 1
    return counts


def cut(samples: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Cuts `samples` into consecutive pieces of the given lengths; the rest is dropped."""
    ends = np.cumsum(counts)
    return [samples[begin:end] for begin, end in zip((ends - counts).tolist(), ends.tolist(), strict=True)]


def merge(pieces: list[np.ndarray]) -> np.ndarray:
    """Returns the samples of all pieces as one ascending int64 array, which may be empty."""
    return np.sort(np.concatenate([np.empty(0, np.int64), *pieces]).astype(np.int64))


def group_by_owner(samples: np.ndarray, owner: np.ndarray, num_owners: int) -> list[np.ndarray]:
    """Groups samples [m] by their owner [m]; each group is ascending."""
    return cut(samples[np.lexsort((samples, owner))], np.bincount(owner, minlength=num_owners))


def split_pooled(
    parts: Sequence[np.ndarray],
    labels: np.ndarray,
    test_share: float,
    streams: Callable[[list[int]], Iterator[np.random.Generator]],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Splits each client's samples into training and test samples, stratified by class.

    The test part has round(test_share m) of the m samples, but each class keeps a training sample, and a client with
    two samples or more has a test sample. Where these conflict (every sample of another class), the test sample takes
    precedence: a client that cannot be evaluated is worth less than one with a class that it is only tested on.

    Args:
        parts: int64 [m], m >= 1, indices into the dataset, of each client.
        labels: int64 [n], of the dataset.
        streams: for ascending ids of clients, the generator of each in turn.
    """
    # Vectorised over the groups of samples of one class of one client: there may be many thousands of clients.
    sizes = np.fromiter(map(len, parts), np.int64, len(parts))
    samples, client = np.concatenate(parts), np.repeat(np.arange(len(parts)), sizes)
    samples = samples[np.lexsort((labels[samples], client))]
    begins = np.flatnonzero(np.diff(labels[samples], prepend=-1) | np.diff(client, prepend=-1))
    of_class, owner = np.diff(begins, append=len(samples)), client[begins]
    num_classes = np.bincount(owner)
    num_test = np.minimum(np.floor(test_share * sizes + 0.5).astype(np.int64), sizes - num_classes)
    num_test[(num_test == 0) & (sizes > num_classes)] = 1
    # One training sample for each class, the others in proportion to what is left of each class.
    rest, spare = sizes - num_test - num_classes, sizes - num_classes
    num_train = _round_to_totals((of_class - 1) / np.maximum(spare, 1)[owner] * rest[owner], rest, owner) + 1
    all_different = (num_test == 0) & (sizes > 1)  # clients with every sample of another class
    shuffled = of_class > 1
    spans = zip(begins[shuffled].tolist(), (begins + of_class)[shuffled].tolist(), strict=True)
    num_spans = np.bincount(owner[shuffled], minlength=len(parts))
    drawing = np.flatnonzero(all_different | (num_spans > 0))
    first_group = np.searchsorted(owner, drawing).tolist()
    for rng, group, count, size in zip(
        streams(drawing.tolist()), first_group, num_spans[drawing].tolist(), sizes[drawing].tolist(), strict=True
    ):
        if not count:  # every sample is of another class: one of them becomes the test sample
            num_train[group + rng.integers(size)] = 0
        for begin, end in islice(spans, count):
            rng.shuffle(samples[begin:end])
    is_train = np.arange(len(samples)) < np.repeat(begins + num_train, of_class)
    train, test = (group_by_owner(samples[mask], client[mask], len(parts)) for mask in (is_train, ~is_train))
    return train, test


def split_share(
    train: Sequence[np.ndarray], share: float, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Splits off validation samples of each client: floor(share m + 0.5) of its m training samples, at random.

    Args:
        train: int64, the samples of each client; none is empty.

    Raises:
        DataError: a client would have no sample left to train on.
    """
    sizes = np.fromiter(map(len, train), np.int64, len(train))
    num_validation = np.floor(share * sizes + 0.5).astype(np.int64)
    client, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum(sizes) - sizes
    marked = np.zeros(len(client), bool)
    shuffled = np.lexsort((rng.random(len(client)), client))  # within each client
    marked[shuffled] = np.arange(len(client)) - starts[client] < num_validation[client]
    return split_marked(train, marked, f"data.validation = {share}")


def split_marked(
    train: Sequence[np.ndarray], marked: np.ndarray, source: str = "the data"
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Splits off the `marked` samples of each client (bool, for the samples of all clients in turn).

    Args:
        source: of the marks, for the error.

    Raises:
        DataError: a client would have no sample left to train on.
    """
    sizes = np.fromiter(map(len, train), np.int64, len(train))
    client, samples = np.repeat(np.arange(len(sizes)), sizes), np.concatenate(train)
    if not (remaining := np.bincount(client[~marked], minlength=len(sizes))).all():
        first = int(remaining.argmin())
        raise DataError(
            f"{source} takes all {sizes[first]} training samples of client {first} for validation, and none is left to "
            "train on; take fewer, or give the client more samples"
        )
    unmarked, validation = (group_by_owner(samples[mask], client[mask], len(sizes)) for mask in (~marked, marked))
    return unmarked, validation


def assign_official_by_class(
    train_counts: np.ndarray,
    test_labels: np.ndarray,
    test_samples: np.ndarray,
    rng: np.random.Generator,
    per_class: int | None,
) -> list[np.ndarray]:
    """Divides the official test samples: each class among its holders, in proportion to their training counts.

    With `per_class` every holder gets that many of the class, and the rest is not used.

    A client that would have none takes one, of a class that it holds, from the client with the most; with fewer test
    samples than clients some stay without. Classes without a holder are left out.

    Args:
        train_counts: int64 [N, K], training samples of each client and class.
        test_labels: int64 [m].
        test_samples: int64 [m], indices into the dataset.

    Raises:
        DataError: a class with too few test samples for `per_class`.
    """
    counts = np.zeros_like(train_counts)
    for label in np.flatnonzero(train_counts.sum(axis=0)).tolist():
        total, holders = int((test_labels == label).sum()), train_counts[:, label] > 0
        if per_class is not None and per_class * holders.sum() > total:
            raise DataError(
                f"data.test_per_class = {per_class}: class {label} has {total} test samples for {holders.sum()} "
                "clients; lower it, or partition.clients"
            )
        counts[:, label] = apportion(total, train_counts[:, label]) if per_class is None else per_class * holders
    for client in np.flatnonzero(counts.sum(axis=1) == 0):
        _take_one(counts, int(client), np.flatnonzero(train_counts[client]))
    shuffled = [rng.permutation(test_samples[test_labels == label]) for label in range(counts.shape[1])]
    return divide_by_class(shuffled, counts)


def divide_by_class(samples: Sequence[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """Divides the samples of each class [K], in their order, among N clients by `counts` [N, K]."""
    num_clients, totals = len(counts), counts.sum(axis=0).tolist()
    owner = [np.repeat(np.arange(num_clients), column) for column in counts.T]
    assigned = np.concatenate([of_class[:total] for of_class, total in zip(samples, totals, strict=True)])
    return group_by_owner(assigned, np.concatenate(owner), num_clients)


def _take_one(counts: np.ndarray, client: int, classes: np.ndarray) -> None:
    """Moves a test sample of one of the classes to a client, in place, from the client with the most samples."""
    for donor in np.argsort(-counts.sum(axis=1), kind="stable"):
        if counts[donor].sum() < 2:
            return
        label = classes[np.argmax(counts[donor, classes])]
        if counts[donor, label] > 0:
            counts[donor, label] -= 1
            counts[client, label] += 1
            return


def assign_official_by_writer(
    train: list[np.ndarray], writers: np.ndarray, test_samples: np.ndarray
) -> list[np.ndarray]:
    """Returns the official test samples of each client: those of its writer.

    Args:
        train: the training samples of each client, of one writer each.
        writers: int64 [n], the writer of each sample of the dataset.
        test_samples: int64 [m], indices into the dataset.
    """
    order = np.argsort(writers[test_samples], kind="stable")
    ordered, of_client = writers[test_samples][order], writers[[samples[0] for samples in train]]
    begins, ends = (np.searchsorted(ordered, of_client, side).tolist() for side in ("left", "right"))
    return [test_samples[order[begin:end]] for begin, end in zip(begins, ends, strict=True)]
