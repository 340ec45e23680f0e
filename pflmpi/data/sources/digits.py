"""Handwritten digits of 8x8 pixels, embedded in scikit-learn: no files, no network."""

from dataclasses import dataclass
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
    summary: str = "1797 handwritten digits, 1x8x8, 10 classes; embedded in scikit-learn, nothing to download"
    embedded: bool = True

    def files(self, root: Path) -> list[Path]:
        """None: there are no files."""
        return []

    def fetch(self, root: Path) -> None:
        """Nothing to fetch: the digits are installed with scikit-learn."""

    def read(self, root: Path) -> Dataset:
        """The digits; 0..16 becomes 0..255, rounded half up in integers."""
        from sklearn.datasets import load_digits

        bunch = load_digits()
        grey = bunch.images.astype(np.int64)  # whole numbers stored as floats
        images = ((grey * 255 + 8) // 16).astype(np.uint8)[:, None]
        return assemble(self.name, images, bunch.target, np.arange(len(images)) >= NUM_TRAIN, num_classes=10)
