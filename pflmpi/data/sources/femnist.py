"""FEMNIST: handwritten characters by writer, as LEAF prepares them, or a sample of them in one file."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pflmpi.data.array_files import read_npz
from pflmpi.data.dataset import Dataset, assemble
from pflmpi.data.leaf import read_leaf
from pflmpi.data.sources.base import missing_error, unreadable_error
from pflmpi.errors import DataError

FOLDERS = ("femnist", "FEMNIST")
SAMPLE = "femnist-sample.npz"
NUM_CLASSES = 62
SIDE = 28
HOW = (
    "run LEAF's data/femnist/preprocess.sh and link its data/train and data/test folders into ROOT/femnist "
    "(LEAF cannot be fetched by data.download)"
)


@dataclass(frozen=True)
class Femnist:
    """LEAF's FEMNIST; ink is dark on white (paper is 255), the opposite of MNIST, as LEAF has it.

    `official_test` is LEAF's own split within each writer. Writers are numbered by their sorted names. A writer with
    only a test part, as in the sample, is a client like any other under the pooled split; the official split leaves it
    out, since partitions are drawn on training samples.
    """

    name: str = "femnist"
    summary: str = "handwritten characters by writer, 1x28x28, 62 classes (LEAF)"
    embedded: bool = False

    def files(self, root: Path) -> list[Path]:
        """Finds LEAF's JSON files, training first, else the one-file sample."""
        for folder in (root / name / below for name in FOLDERS for below in ("", "data")):
            train, test = (
                sorted(path for path in (folder / part).glob("*.json") if path.is_file()) for part in ("train", "test")
            )
            if train and test:
                return train + test
            if train or test:
                part = "test" if train else "train"
                raise missing_error(self.name, folder, f"{part}/*.json", HOW)
        for path in (root / name / SAMPLE for name in FOLDERS):
            if path.is_file():
                return [path]
        wanted = f"femnist/train/*.json with femnist/test/*.json, or FEMNIST/{SAMPLE},"
        raise missing_error(self.name, root, wanted, HOW)

    def fetch(self, root: Path) -> None:
        """Raises `DataError` unless the files are there: LEAF offers no download."""
        self.files(root)

    def read(self, root: Path) -> Dataset:
        """Reads the dataset, from LEAF's files or from the sample."""
        files = self.files(root)
        return self._sample(files[0]) if files[0].suffix == ".npz" else self._leaf(files)

    def _sample(self, path: Path) -> Dataset:
        try:
            images, labels, test, writers = read_npz(path, ("images", "labels", "test", "writer")).values()
        except (OSError, ValueError) as error:
            raise unreadable_error(self.name, path, error) from error
        if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (SIDE, SIDE):
            raise unreadable_error(
                self.name, path, f"images are {images.dtype} {list(images.shape)}, not uint8 [n, 28, 28]"
            )
        try:
            return assemble(self.name, images[:, None], labels, test, NUM_CLASSES, writers)
        except DataError as error:
            raise unreadable_error(self.name, path, error) from error

    def _leaf(self, files: list[Path]) -> Dataset:
        folder = files[0].parent.parent
        try:
            arrays = read_leaf(folder)
            assert arrays.client is not None and arrays.test is not None
            if arrays.x.shape[1:] != (SIDE * SIDE,) or not ((arrays.x >= 0) & (arrays.x <= 1)).all():
                raise ValueError(f"images are {list(arrays.x.shape)}, expected [n, {SIDE * SIDE}] from 0 to 1")
            images = np.rint(arrays.x * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE)
            _, writers = np.unique(arrays.client, return_inverse=True)
            return assemble(self.name, images, arrays.y, arrays.test, NUM_CLASSES, writers)
        except (OSError, ValueError) as error:
            raise unreadable_error(self.name, folder, error) from error
