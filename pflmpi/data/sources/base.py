"""The contract of a data source, the errors that sources raise, and the lock for downloads."""

import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pflmpi.data.dataset import Dataset
from pflmpi.errors import DataError

SHARED_FOLDER = "set data.root, or the environment variable PFLMPI_DATA, to the data folder"


class Source(Protocol):
    """A named dataset that can be read from a folder, or that is embedded in a library."""

    @property
    def name(self) -> str:
        """Name in the configuration."""

    @property
    def summary(self) -> str:
        """One line for lists."""

    @property
    def embedded(self) -> bool:
        """Whether no folder is needed."""

    def files(self, root: Path) -> list[Path]:
        """Returns the files that determine the content; `DataError` if any is missing."""

    def fetch(self, root: Path) -> None:
        """Downloads the files; `DataError` if that fails or is impossible."""

    def read(self, root: Path) -> Dataset:
        """Reads the dataset; `DataError` naming the file that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class OwnSource(ABC):
    """A dataset from outside the package; the fields of a subclass are keys of the `data` section."""

    @abstractmethod
    def read(self, root: Path) -> Dataset:
        """The dataset, made with `assemble`; the same whenever it is called. `root`: the data folder, if one is set."""


def missing_error(name: str, looked_in: Path, wanted: str, by_network: str) -> DataError:
    """Makes the error for a dataset that was not found, with the two ways to get it.

    Args:
        looked_in: the folder that was searched.
        wanted: the files expected, and where.
        by_network: the first way, such as `data.download: true`.
    """
    return DataError(
        f"dataset {name!r} was not found in {looked_in}: {wanted} is missing; "
        f"either {by_network}, or put the files there (or {SHARED_FOLDER} that has them)"
    )


def unreadable_error(name: str, file: Path, reason: object) -> DataError:
    """Makes the error for a file that exists but cannot be used."""
    text = str(reason) or type(reason).__name__
    return DataError(f"dataset {name!r}: {file} cannot be read ({text}); put a good copy in its place, or delete it")


@contextmanager
def download_lock(name: str, root: Path) -> Iterator[None]:
    """Holds the download lock of a data folder, and turns the errors of a failed download into a `DataError`.

    Other ranks wait here, and then find the files in place.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / ".pflmpi-download.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"dataset {name!r} cannot be downloaded to {root} ({error}); set data.root to a writable folder"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    except Exception as error:  # of the network, or of torchvision about what came in place of a file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"dataset {name!r} could not be downloaded to {root} ({reason}); "
            f"check the network, or copy the files there from a machine that has them and set data.download: false"
        ) from error
    finally:
        os.close(lock)
