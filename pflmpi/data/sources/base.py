"""What a source of data is, and the words that all of them use when something is wrong."""

from pathlib import Path
from typing import Protocol

from pflmpi.data.dataset import Dataset
from pflmpi.errors import DataError

SHARED_FOLDER = "set data.root, or the environment variable PFLMPI_DATA, to the data folder"


class Source(Protocol):
    """A named dataset that can be read from a folder, or that is embedded in a library."""

    @property
    def name(self) -> str:
        """The name in `data.name`."""

    @property
    def summary(self) -> str:
        """One line for lists."""

    @property
    def embedded(self) -> bool:
        """True where no folder is needed."""

    def files(self, root: Path) -> list[Path]:
        """Return the files that decide the content; `DataError` where any is missing."""

    def fetch(self, root: Path) -> None:
        """Get the files from the network; `DataError` where that fails or is not possible."""

    def read(self, root: Path) -> Dataset:
        """Return the dataset; `DataError` naming the file that cannot be read."""


def missing(name: str, looked_in: Path, wanted: str, by_network: str) -> DataError:
    """Return the error for a dataset that is not there, with the two ways to get it.

    Args:
        name: of the dataset.
        looked_in: the folder that was searched.
        wanted: which files belong where.
        by_network: the first way, such as `data.download: true`.
    """
    return DataError(
        f"dataset {name!r} was not found in {looked_in}: {wanted} is missing; "
        f"either {by_network}, or put the files there (or {SHARED_FOLDER} that has them)"
    )


def unreadable(name: str, file: Path, reason: object) -> DataError:
    """Return the error for a file that is there and cannot be used."""
    text = str(reason) or type(reason).__name__
    return DataError(f"dataset {name!r}: {file} cannot be read ({text}); put a good copy in its place, or delete it")
