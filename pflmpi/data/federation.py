"""The clients and their data: who trains and tests on which samples, fixed for the whole run."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pflmpi import atomic
from pflmpi.data.array_files import read_npz
from pflmpi.data.config import DataConfig, PartitionConfig
from pflmpi.data.dataset import Dataset
from pflmpi.data.partitions import PARTITIONS, WITHOUT_CLASSES, get_partition_key
from pflmpi.data.sources import SOURCES
from pflmpi.data.splits import (
    assign_official_by_class,
    assign_official_by_writer,
    cut,
    split_marked,
    split_pooled,
    split_share,
)
from pflmpi.errors import DataError
from pflmpi.rng import stream, streams
from pflmpi.text import join_truncated, pluralize

logger = logging.getLogger(__name__)

Samples = Sequence[np.ndarray]  # int64 indices into a dataset, of each client


@dataclass(frozen=True, eq=False)
class Federation:
    """The samples of N clients, as ascending indices into a dataset."""

    dataset: Dataset
    train: tuple[np.ndarray, ...]  # int64, of each client; never empty
    test: tuple[np.ndarray, ...]  # int64, of each client; may be empty if it has very few samples
    digest: str  # SHA-256 over the dataset's digest and all indices, hex
    class_counts: np.ndarray  # int64 [N, K], training samples
    validation: tuple[np.ndarray, ...] = ()  # int64, of each client, not in `train`; () without validation samples

    @property
    def num_clients(self) -> int:
        """Number of clients (N)."""
        return len(self.train)

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """[N], names of the clients in the user's own data; () if it names none, or the partition mixes them."""
        writers, names = self.dataset.writers, self.dataset.written_clients
        if writers is None or not names:
            return ()
        owners = writers[np.concatenate(self.train)]
        first = owners[np.cumsum(self.num_train) - self.num_train]
        one_each = len(np.unique(first)) == self.num_clients and (owners == np.repeat(first, self.num_train)).all()
        return tuple(names[number] for number in first) if one_each else ()

    @cached_property
    def num_train(self) -> np.ndarray:
        """Training samples of each client, int64 [N]."""
        return _lengths(self.train)

    @cached_property
    def num_test(self) -> np.ndarray:
        """Test samples of each client, int64 [N]."""
        return _lengths(self.test)

    @cached_property
    def num_validation(self) -> np.ndarray:
        """Validation samples of each client, int64 [N]; [0] without validation samples."""
        return _lengths(self.validation)

    @cached_property
    def test_class_counts(self) -> np.ndarray:
        """Test samples of each client and class, int64 [N, K]."""
        return _count_classes(self.dataset, self.test)

    @cached_property
    def for_validation(self) -> "Federation | None":
        """The same clients, tested on their validation samples instead; None without validation samples."""
        return replace(self, test=self.validation) if self.validation else None

    @property
    def samples(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Training, test and, where there are some, validation samples of each client."""
        return zip(*filter(None, (self.train, self.test, self.validation)), strict=True)

    @property
    def num_shared(self) -> int:
        """Number of samples that more than one client has; no client has a sample twice."""
        return int((np.bincount(np.concatenate([*self.train, *self.test, *self.validation])) > 1).sum())


def build(dataset: Dataset, partition: PartitionConfig, data: DataConfig, seed: int) -> Federation:
    """Builds the federation that a configuration describes; the same on every rank.

    Validation samples are taken from each client's training samples: those that the dataset marks (but with
    `data.split: pooled`, or a saved partition), or else a random share.

    Raises:
        DataError: a partition, or a validation share, that is impossible with this data.
    """
    validation: Samples = ()
    if partition.path is not None:
        _warn_without_effect(data, ("test_share", "test_per_class"), partition.path)
        train, test, validation = _read_saved(dataset, Path(partition.path))
        count = dataset.official_test[np.unique(np.concatenate(train))].sum()
        if count and resolve_split(data, dataset) == "official":
            what = "%d samples are trained on that dataset %r marks as test samples: partition %s has them so"
            logger.warning(what, count, dataset.name, partition.path)
    else:
        train, test = _draw_split(dataset, partition, data, seed)
    marks = dataset.official_validation if data.split != "pooled" and partition.path is None else None
    if data.validation and (validation or marks is not None):
        source = f"dataset {dataset.name!r} marks" if partition.path is None else f"partition {partition.path} has"
        raise DataError(
            f"data.validation = {data.validation}, but {source} validation samples already; leave the key out"
        )
    if marks is not None:
        train, validation = split_marked(train, marks[np.concatenate(train)])
    elif data.validation:
        train, validation = split_share(train, data.validation, stream(seed, 0, -1, "validation"))
    return _make_federation(dataset, train, test, validation)


def _draw_split(dataset: Dataset, partition: PartitionConfig, data: DataConfig, seed: int) -> tuple[Samples, Samples]:
    """Draws a partition by name; returns the training and test samples of each client.

    `data.split: pooled` divides all samples and splits each client's; `official` divides the official training samples
    and gives out the official test samples by the same class proportions (or by writer). For `auto` see
    `resolve_split`.

    Raises:
        DataError: a partition that is impossible with this data.
    """
    assert partition.name is not None
    rng = stream(seed, 0, -1, "partition")
    by_writer = get_partition_key(partition.name) == "writers"
    key = _get_writers(dataset, partition.name) if by_writer else _get_labels(dataset, partition.name)
    split = resolve_split(data, dataset)
    if data.test_per_class is not None and (split == "pooled" or by_writer):
        raise DataError(
            f"data.test_per_class = {data.test_per_class} divides official test samples by class: set data.split: "
            "official, with a partition by label"
        )
    pool = np.arange(len(key)) if split == "pooled" else np.flatnonzero(~dataset.official_test)
    _check_pool(dataset, pool, by_writer, limited=data.limit is not None)
    shares = _call_partition(partition, key[pool], rng, seed)
    if isinstance(shares, list) and shares and isinstance(shares[0], tuple):
        return _split_by_partition(dataset, shares, partition, data)
    shares = _check_shares(shares, partition, len(pool))
    _refuse_repeats(f"partition {partition.name!r}", shares)
    train = cut(pool[np.concatenate(shares)], _lengths(shares))
    if split == "pooled":
        return split_pooled(train, dataset.strata, data.test_share, partial(streams, seed, 0, purpose="split"))
    _warn_without_effect(data, ("test_share",), f"data.split: {data.split} with the marks of dataset {dataset.name!r}")
    official = np.flatnonzero(dataset.official_test)
    if by_writer:
        test = assign_official_by_writer(train, key, official)
    else:
        counts, labels = _count_classes(dataset, train), dataset.strata[official]
        test = assign_official_by_class(counts, labels, official, rng, data.test_per_class)
        if (unused := len(official) - sum(map(len, test))) and data.test_per_class is None:
            logger.warning("%d of %d test samples are left out: no client trains on their class", unused, len(official))
    if not any(map(len, test)):
        raise DataError(
            f"data.split: official leaves all {len(train)} clients of dataset {dataset.name!r} without test samples: "
            f"none of its {len(official)} official test samples matches them; set data.split: pooled"
        )
    return train, test


def _call_partition(partition: PartitionConfig, key: np.ndarray, rng: np.random.Generator, seed: int) -> Any:
    """Calls the function of a partition; one from outside the package also gets seeded global generators.

    Raises:
        DataError: one from outside returns other samples at a second call.
    """
    assert partition.name is not None
    function = partial(PARTITIONS[partition.name], key, partition.clients, **partition.parameters)
    if not PARTITIONS.reference(partition.name):
        return function(rng)
    from pflmpi import global_generators  # here, as it imports torch

    key.flags.writeable = False
    results = []
    for generator in (deepcopy(rng), rng):
        with global_generators.seeded(seed):
            results.append(function(generator))
    if not _are_equal(*results):
        raise DataError(
            f"partition {partition.name!r} returns other samples at a second call; it must follow from its arguments "
            "alone, and draw from `rng`"
        )
    return results[0]


def _are_equal(shares: object, other: object) -> bool:
    """Whether two results of a partition are the same; also where they are no lists of arrays, which are refused."""
    if isinstance(shares, list | tuple) and isinstance(other, list | tuple):
        return len(shares) == len(other) and all(map(_are_equal, shares, other))
    return not isinstance(shares, np.ndarray) or np.array_equal(shares, np.asarray(other))


def _warn_without_effect(data: DataConfig, names: Sequence[str], instead: str) -> None:
    for name in names:
        if getattr(data, name) != DataConfig.model_fields[name].default:
            logger.warning("data.%s has no effect: %s says which samples of a client are for testing", name, instead)


def resolve_split(data: DataConfig, dataset: Dataset) -> Literal["pooled", "official"]:
    """Returns `data.split`, with `auto` resolved: official for the user's own data that marks test samples."""
    if data.split != "auto":
        return data.split
    own = data.path is not None or SOURCES.reference(data.name) is not None
    return "official" if own and dataset.official_test.any() else "pooled"


def _check_pool(dataset: Dataset, pool: np.ndarray, by_writer: bool, limited: bool) -> None:
    """Raises `DataError` if the training samples [m] are empty, or lack a client: the others would be renumbered."""
    if not len(pool):
        raise DataError(
            f"all {len(dataset.labels)} samples of dataset {dataset.name!r} are test samples, and none is left to "
            "train on; mark fewer of them, or set data.split: pooled"
        )
    if by_writer and dataset.writers is not None:
        num_named = len(dataset.written_clients)
        missing = np.flatnonzero(np.bincount(dataset.writers[pool], minlength=num_named)[:num_named] == 0)
        if len(missing):
            raise DataError(
                f"no training samples of client "
                f"{join_truncated([dataset.written_clients[client] for client in missing])}, and without it the "
                f"others would be numbered anew: mark fewer of its samples as test, take it out of the data, "
                f"{'set data.split: pooled, or raise data.limit' if limited else 'or set data.split: pooled'}"
            )


def select_clients(federation: Federation, clients: np.ndarray) -> Federation:
    """Returns the federation of some clients, renumbered in the given order."""
    sides = (federation.train, federation.test, federation.validation)
    train, test, validation = ([side[client] for client in clients] if side else [] for side in sides)
    digest, counts = _compute_digest(federation.dataset, train, test, validation), federation.class_counts[clients]
    return Federation(federation.dataset, tuple(train), tuple(test), digest, counts, tuple(validation))


def save(federation: Federation, path: Path) -> None:
    """Writes each client's samples for `partition.path`, an .npz without pickles; `DataError` if it cannot."""
    arrays = {"dataset_digest": np.array(federation.dataset.digest), "digest": np.array(federation.digest)}
    sides = {"train": federation.train, "test": federation.test}
    if federation.validation:
        sides["validation"] = federation.validation
    for name, parts in sides.items():
        arrays[name] = np.concatenate([np.empty(0, np.int64), *parts])
        arrays[f"num_{name}"] = _lengths(parts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as descriptor, open(descriptor, "wb", closefd=False) as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise DataError(f"partition {path} cannot be written ({error}); choose a folder that can be written") from error


def _read_saved(dataset: Dataset, path: Path) -> tuple[Samples, Samples, Samples]:
    """Reads the training, test and validation samples that `save` wrote.

    Raises:
        DataError: the file cannot be read, is damaged, was made for other data, or gives a client a sample twice.
    """
    try:
        names = ("train", "num_train", "test", "num_test", "dataset_digest", "digest")
        arrays = read_npz(path, names, ("validation", "num_validation"))
        train, test = (_cut_clients(arrays[name], arrays[f"num_{name}"]) for name in ("train", "test"))
        validation = []
        if "validation" in arrays:
            validation = _cut_clients(arrays["validation"], arrays.get("num_validation", np.empty(0)))
    except FileNotFoundError:
        raise DataError(f"partition {path} does not exist; give the path of a saved partition") from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"partition {path} cannot be read ({error}); put a good copy in its place, or make a new partition"
        ) from error
    dataset_digest, digest = arrays["dataset_digest"], arrays["digest"]
    if str(dataset_digest) != dataset.digest:
        raise DataError(
            f"partition {path} was made for data with digest {dataset_digest}, dataset {dataset.name!r} has "
            f"{dataset.digest}; use the data (and data.limit) that it was made for, or make a new partition"
        )
    computed = _compute_digest(dataset, train, test, validation)
    if computed != str(digest):  # before any index is used: a damaged one may be anything
        raise DataError(
            f"partition {path} is damaged: its digest is {computed}, written was {digest}; "
            f"put a good copy in its place, or make a new partition"
        )
    _refuse_repeats(f"partition {path}", train, test, validation)
    return train, test, validation


def _cut_clients(samples: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Cuts a flat array into the samples of each client; `ValueError` if the lengths do not add up."""
    valid = samples.ndim == lengths.ndim == 1 and samples.dtype == lengths.dtype == np.int64
    if not valid or (lengths < 0).any() or lengths.sum() != len(samples):
        raise ValueError("its arrays do not belong together")
    return cut(samples, lengths)


def _split_by_partition(
    dataset: Dataset, shares: list[tuple[np.ndarray, np.ndarray]], partition: PartitionConfig, data: DataConfig
) -> tuple[Samples, Samples]:
    """Checks the result of a partition that returns training and test samples; they are indices of all samples."""
    split, default = resolve_split(data, dataset), DataConfig.model_fields["test_share"].default
    if split != "pooled" or data.test_share != default:
        raise DataError(
            f"partition {partition.name!r} splits the samples of each client itself, but data.split = {split} and "
            f"data.test_share = {data.test_share}; set pooled and {default}, or choose a partition that does not"
        )
    train, test = (
        [np.asarray(samples, np.int64) for samples in _check_shares(side, partition, len(dataset.labels))]
        for side in ([share[0] for share in shares], [share[1] for share in shares])
    )
    _refuse_repeats(f"partition {partition.name!r}", train, test)
    return train, test


def _check_shares(shares: list[np.ndarray], partition: PartitionConfig, count: int) -> list[np.ndarray]:
    """Checks and returns what a partition returned; its function may be from outside the package."""
    name = partition.name
    expected = f"expected a list of integer arrays, one per client, not empty, with indices from 0 to {count - 1}"
    if not isinstance(shares, list) or not shares:
        raise DataError(f"partition {name!r} returned a {type(shares).__name__} without clients; {expected}")
    if partition.clients not in (None, len(shares)):
        raise DataError(f"partition {name!r} returned {len(shares)} clients; partition.clients = {partition.clients}")
    for client, samples in enumerate(shares):
        if not isinstance(samples, np.ndarray) or samples.ndim != 1 or samples.dtype.kind not in "iu":
            kind, shape = getattr(samples, "dtype", type(samples).__name__), getattr(samples, "shape", ())
            raise DataError(f"partition {name!r} returned {kind} {shape} for client {client}; {expected}")
    indices = np.concatenate(shares)
    if _lengths(shares).all() and indices.min() >= 0 and indices.max() < count:
        return shares  # without the loop below, which is slow for many clients
    for client, samples in enumerate(shares):
        if not len(samples) or samples.min() < 0 or samples.max() >= count:
            span = f"indices from {samples.min()} to {samples.max()}" if len(samples) else "no samples"
            raise DataError(f"partition {name!r} returned {span} for client {client}; {expected}")
    return shares


def _refuse_repeats(source: str, *sides: Samples) -> None:
    """Raises `DataError` if a client has a sample twice: it would be tested on what it trains on, or count double."""
    clients = [np.concatenate(parts) for parts in zip(*filter(None, sides), strict=True)]
    if np.bincount(np.concatenate(clients)).max(initial=0) <= 1:
        return  # without the sorts below, which take seconds for millions of samples
    for client, samples in enumerate(clients):
        indices, counts = np.unique(samples, return_counts=True)
        if (repeated := indices[counts > 1]).size:
            raise DataError(
                f"{source} gives {pluralize(len(repeated), 'sample')} to client {client} more than once, such as index "
                f"{repeated[0]}; a client may have each sample once"
            )


def _make_federation(dataset: Dataset, train: Samples, test: Samples, validation: Samples) -> Federation:
    """Makes a federation, after checking that there are samples to test on; warns of unusual ones."""
    _check_not_empty("test", dataset, test, "give them two samples or more each, or another partition")
    if validation:
        _check_not_empty("validation", dataset, validation, "raise data.validation, or give each client more samples")
    digest, counts = _compute_digest(dataset, train, test, validation), _count_classes(dataset, train)
    federation = Federation(dataset, tuple(train), tuple(test), digest, counts, tuple(validation))
    if untrained := int(federation.test_class_counts[:, counts.sum(axis=0) == 0].sum()):
        logger.warning("%d test samples are of classes that no client trains on", untrained)
    if shared := federation.num_shared:
        tested = len(np.intersect1d(np.concatenate(train), np.concatenate(test)))
        what = "%d samples are with more than one client; %d of them are trained on by one and tested by another"
        logger.warning(what, shared, tested)
    return federation


def _check_not_empty(side: str, dataset: Dataset, samples: Samples, remedy: str) -> None:
    """Raises `DataError` if no client has test (or validation) samples, and warns of clients without any."""
    if (without := sum(not len(of_client) for of_client in samples)) == len(samples):
        raise DataError(f"none of the {without} clients of dataset {dataset.name!r} has a {side} sample; {remedy}")
    if without:
        logger.warning("%d of %d clients have no %s samples", without, len(samples), side)


def _compute_digest(dataset: Dataset, train: Samples, test: Samples, validation: Samples) -> str:
    digest = hashlib.sha256(f"dataset {dataset.digest}\n".encode())
    for kind, arrays in (("train", train), ("test", test), ("validation", validation)):
        for client, samples in enumerate(arrays):
            digest.update(f"{kind} {client} {len(samples)}\n".encode())
            digest.update(np.ascontiguousarray(samples, dtype="<i8").data)
    return digest.hexdigest()


def _count_classes(dataset: Dataset, parts: Samples) -> np.ndarray:
    """Counts the samples of each client and class, int64 [N, K]."""
    num_clients, num_classes = len(parts), dataset.num_strata
    cells = np.repeat(np.arange(num_clients) * num_classes, _lengths(parts)) + dataset.strata[np.concatenate(parts)]
    return np.bincount(cells, minlength=num_clients * num_classes).reshape(num_clients, num_classes)


def _lengths(parts: Samples) -> np.ndarray:
    return np.fromiter(map(len, parts), np.int64, len(parts))


def _get_labels(dataset: Dataset, partition: str) -> np.ndarray:
    """Returns the labels for a partition; where they are no classes, built-in ones get zeros, or raise `DataError`."""
    if dataset.task_kind.classes or PARTITIONS.reference(partition):
        return dataset.labels
    if partition not in WITHOUT_CLASSES:
        raise DataError(
            f"partition {partition!r} divides by class, and the labels of dataset {dataset.name!r} are no classes "
            f"(data.task); choose {', '.join(WITHOUT_CLASSES)}, or one of your own"
        )
    return dataset.strata


def _get_writers(dataset: Dataset, partition: str) -> np.ndarray:
    if dataset.writers is None:
        raise DataError(
            f"partition {partition!r} needs the writer of each sample, which dataset {dataset.name!r} does not have; "
            f"use femnist, or mnist with MNIST/writers.npz in the data folder, or another partition"
        )
    return dataset.writers
