"""A dataset as the rest of the package sees it: arrays on the host, and a digest of their content."""

import hashlib
from dataclasses import dataclass

import numpy as np

from pflmpi.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with labels; official training and test samples together, distinguished by `official_test`.

    `digest` covers the arrays and the number of classes, not the name: two folders with the same content agree.
    """

    name: str
    images: np.ndarray  # uint8 [n, C, H, W]; may be a read-only memory map
    labels: np.ndarray  # int64 [n]
    official_test: np.ndarray  # bool [n]
    writers: np.ndarray | None  # int64 [n], who wrote each sample; None if unknown
    num_classes: int
    mean: tuple[float, ...]  # per channel, for values scaled to 0..1
    std: tuple[float, ...]
    digest: str  # SHA-256, hex


def assemble(
    name: str,
    images: np.ndarray,
    labels: np.ndarray,
    official_test: np.ndarray,
    num_classes: int,
    writers: np.ndarray | None = None,
    digest: str | None = None,
) -> Dataset:
    """A dataset of the given arrays, after checking that they match.

    Mean and standard deviation are 0.5 for every channel, as in the published personalised runs.

    Args:
        name: for messages.
        images: uint8 [n, C, H, W].
        labels: integers [n] in 0..num_classes-1.
        official_test: bool [n].
        num_classes: K.
        writers: integers [n] or None.
        digest: if already known; None computes it.

    Raises:
        DataError: arrays of different lengths, or labels out of range.
    """
    count = len(images)
    sizes = {
        "labels": len(labels),
        "official_test": len(official_test),
        "writers": count if writers is None else len(writers),
    }
    for what, size in sizes.items():
        if size != count:
            raise DataError(f"dataset {name!r} has {count} images but {size} {what}; its files do not belong together")
    assert images.dtype == np.uint8 and images.ndim == 4, (images.dtype, images.shape)
    labels = np.asarray(labels, dtype=np.int64)
    if count == 0:
        raise DataError(f"dataset {name!r} has no samples; its files are empty")
    if labels.min() < 0 or labels.max() >= num_classes:
        found = f"{labels.min()}..{labels.max()}"
        raise DataError(f"dataset {name!r} has labels {found}, allowed are 0..{num_classes - 1}; its files are damaged")
    official_test = np.asarray(official_test, dtype=bool)
    writers = None if writers is None else np.asarray(writers, dtype=np.int64)
    digest = digest or content_digest(images, labels, official_test, writers, num_classes)
    middle = (0.5,) * images.shape[1]
    return Dataset(name, images, labels, official_test, writers, num_classes, middle, middle, digest)


def content_digest(
    images: np.ndarray, labels: np.ndarray, official_test: np.ndarray, writers: np.ndarray | None, num_classes: int
) -> str:
    """SHA-256 (hex) over dtype, shape and bytes of the arrays, and over the number of classes."""
    digest = hashlib.sha256(f"classes {num_classes}\n".encode())
    arrays = {"images": images, "labels": labels, "official_test": official_test, "writers": writers}
    for name, array in arrays.items():
        if array is not None:
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
