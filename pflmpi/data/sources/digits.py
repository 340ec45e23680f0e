"""Handwritten digits of 8x8 pixels, embedded in scikit-learn: no files, no network."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from pflmpi.data.dataset import Dataset, assemble

NUM_TRAIN = 1500


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1797 digits.

    The set has no official split. The first 1500 samples are called training, the last 297 test: they come in the
    order in which people wrote them, so this keeps most writers on one side of the split.
    """

    name: str = "digits"
    summary: str = "1797 handwritten digits, 1x8x8, 10 classes, from scikit-learn"
    embedded: bool = True

    def files(self, root: Path) -> list[Path]:
        """Returns no files."""
        return []

    def fetch(self, root: Path) -> None:
        """Nothing to fetch: the digits are installed with scikit-learn."""

    def read(self, root: Path) -> Dataset:
        """Reads the digits; 0..16 becomes 0..255, rounded half up in integers."""
        table = _read_digits()
        images = ((table[:, :64] * 255 + 8) // 16).astype(np.uint8).reshape(-1, 1, 8, 8)
        return assemble(self.name, images, table[:, 64].copy(), np.arange(len(images)) >= NUM_TRAIN, num_classes=10)


def _read_digits() -> np.ndarray:
    """Reads [1797, 65] int64, 64 pixels and the label, from scikit-learn's file without importing scikit-learn."""
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None, "scikit-learn is a dependency"
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        return _read_table(file)
    from sklearn.datasets import load_digits  # a version that keeps them elsewhere; this takes a second and 100 MB

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target]).astype(np.int64)


@cache  # a process may make many runs
def _read_table(file: Path) -> np.ndarray:
    return np.loadtxt(file, np.int64, delimiter=",")
