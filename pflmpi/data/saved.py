"""The file of a saved partition: an .npz without pickles, checked when it is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pflmpi import atomic
from pflmpi.data.npz import read_npz
from pflmpi.data.shares import cut
from pflmpi.errors import DataError


@dataclass(frozen=True)
class SavedSplit:
    """Contents of the file: the samples of each client, and the digests of data and federation."""

    dataset_digest: str
    digest: str
    train: list[np.ndarray]
    test: list[np.ndarray]


def write_split(
    path: Path, dataset_digest: str, digest: str, train: Sequence[np.ndarray], test: Sequence[np.ndarray]
) -> None:
    """Write the file atomically.

    Raises:
        DataError: the folder is not writable, or the disk is full.
    """
    arrays = {"dataset_digest": np.array(dataset_digest), "digest": np.array(digest)}
    for name, parts in (("train", train), ("test", test)):
        arrays[name] = np.concatenate([np.empty(0, np.int64), *parts])
        arrays[f"num_{name}"] = np.array([len(part) for part in parts], dtype=np.int64)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as descriptor, open(descriptor, "wb", closefd=False) as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise DataError(f"partition {path} cannot be written ({error}); choose a folder that can be written") from error


def read_split(path: Path) -> SavedSplit:
    """Contents of a file.

    Raises:
        DataError: no such file, or not one that `write_split` wrote.
    """
    try:
        names = ("train", "num_train", "test", "num_test", "dataset_digest", "digest")
        train, num_train, test, num_test, dataset_digest, digest = read_npz(path, names)
        return SavedSplit(str(dataset_digest), str(digest), _parts(train, num_train), _parts(test, num_test))
    except FileNotFoundError:
        raise DataError(f"partition {path} does not exist; give the path of a saved partition") from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"partition {path} cannot be read ({error}); put a good copy in its place, or make a new partition"
        ) from error


def _parts(samples: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Samples of each client, cut from the flat array; `ValueError` if the lengths do not add up."""
    flat = samples.ndim == lengths.ndim == 1 and samples.dtype == lengths.dtype == np.int64
    if not flat or (lengths < 0).any() or lengths.sum() != len(samples):
        raise ValueError("its arrays do not belong together")
    return cut(samples, lengths)
