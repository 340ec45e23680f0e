"""Training and test samples of each client, and the rounding of fractional shares to whole samples."""

from collections.abc import Sequence

import numpy as np

from pflmpi.errors import DataError


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


def split_pooled(
    samples: np.ndarray, labels: np.ndarray, test_share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Training and test samples of one client, stratified by class.

    The test part has round(test_share m) of the m samples, but each class keeps a training sample, and a client with
    two samples or more has a test sample. Where both are impossible (every sample of another class), the test sample
    takes precedence: a client that cannot be evaluated is worth less than one with a class it is only tested on.

    Args:
        samples: int64 [m], m >= 1, indices into the dataset.
        labels: int64 [m].
    """
    count = len(samples)
    classes, sizes = np.unique(labels, return_counts=True)
    num_test = min(int(np.floor(test_share * count + 0.5)), count - len(classes))
    if num_test == 0 and count > len(classes):
        num_test = 1
    # One training sample for each class, the other training samples by what is left of each class.
    num_train = apportion(count - num_test, sizes - 1, floor=1)
    if num_test == 0 and count > 1:
        num_train[rng.integers(len(classes))] = 0
    train, test = [], []
    for label, size, kept in zip(classes, sizes, num_train, strict=True):
        shuffled = rng.permutation(samples[labels == label])
        pieces = cut(shuffled, np.array([kept, size - kept]))
        train.append(pieces[0])
        test.append(pieces[1])
    return merged(train), merged(test)


def split_share(
    train: Sequence[np.ndarray], share: float, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Training and validation samples of each client: of m samples floor(share m + 0.5), drawn at random, validate.

    Args:
        train: int64, ascending, the samples of each client; none is empty.

    Raises:
        DataError: a client would have no sample left to train on.
    """
    sizes = np.array([len(samples) for samples in train])
    taken = np.floor(share * sizes + 0.5).astype(np.int64)
    whose, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum(sizes) - sizes
    order = np.lexsort((rng.random(len(whose)), whose))  # each client's samples shuffled
    chosen = np.zeros(len(whose), bool)
    chosen[order] = np.arange(len(whose)) - starts[whose] < taken[whose]
    return split_marked(train, np.split(chosen, starts[1:]), f"data.validation = {share}")


def split_marked(
    train: Sequence[np.ndarray], marked: Sequence[np.ndarray], why: str = "the data"
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Samples of each client that are not `marked` (bool, as `train`), and those that are; raises as `split_share`."""
    for client, marks in enumerate(marked):
        if marks.all():
            raise DataError(
                f"{why} takes all {len(marks)} training samples of client {client} for validation, and none is left to "
                "train on; take fewer, or give the client more samples"
            )
    sides = [(samples[~marks], samples[marks]) for samples, marks in zip(train, marked, strict=True)]
    return [kept for kept, _ in sides], [validation for _, validation in sides]


def official_by_class(
    train_counts: np.ndarray,
    test_labels: np.ndarray,
    test_samples: np.ndarray,
    rng: np.random.Generator,
    per_class: int | None = None,
) -> list[np.ndarray]:
    """Official test samples of each client: every class is divided among its holders by their training counts.

    With `per_class` every holder has that many of the class, and what is left is nobody's.

    A client that would have none takes one, of a class that it holds, from the client with the most; with fewer test
    samples than clients some stay without. Classes that nobody holds are left out.

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
    pieces: list[list[np.ndarray]] = [[] for _ in range(len(counts))]
    for label in range(counts.shape[1]):
        shuffled = rng.permutation(test_samples[test_labels == label])
        for own, piece in zip(pieces, cut(shuffled, counts[:, label]), strict=True):
            own.append(piece)
    return [merged(own) for own in pieces]


def _take_one(counts: np.ndarray, client: int, classes: np.ndarray) -> None:
    """Move one test sample of one of the classes to a client, in place, from the client with the most samples."""
    for donor in np.argsort(-counts.sum(axis=1), kind="stable"):
        if counts[donor].sum() < 2:
            return
        label = classes[np.argmax(counts[donor, classes])]
        if counts[donor, label] > 0:
            counts[donor, label] -= 1
            counts[client, label] += 1
            return


def official_by_writer(train: list[np.ndarray], writers: np.ndarray, test_samples: np.ndarray) -> list[np.ndarray]:
    """Official test samples of each client: those of its writer.

    Args:
        train: the training samples of each client, of one writer each.
        writers: int64 [n], the writer of each sample of the dataset.
        test_samples: int64 [m], indices into the dataset.
    """
    owners = writers[test_samples]
    return [test_samples[owners == writers[samples[0]]] for samples in train]
