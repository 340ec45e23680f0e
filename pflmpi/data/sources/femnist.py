"""FEMNIST: handwritten characters by writer, as LEAF prepares them, or a sample of them in one file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.data.array_files import read_npz
from pflmpi.data.dataset import Dataset, assemble
from pflmpi.data.leaf import read_users
from pflmpi.data.numbers import to_integers
from pflmpi.data.sources.base import missing_error, unreadable_error
from pflmpi.errors import DataError
from pflmpi.text import first_line

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
        images, labels, names, test = [], [], [], []
        for path in files:
            for user, x, y in _read_users(self.name, path):
                images.append(x)
                labels.append(y)
                names += [user] * len(y)
                test.append(np.full(len(y), path.parent.name == "test"))
        if not names:
            raise DataError(f"dataset {self.name!r}: the JSON files in {files[0].parent.parent} hold no samples; {HOW}")
        _, writers = np.unique(np.array(names), return_inverse=True)
        return assemble(
            self.name, np.concatenate(images), np.concatenate(labels), np.concatenate(test), NUM_CLASSES, writers
        )


def _read_users(name: str, path: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Reads a JSON file; returns (user, uint8 [m, 1, 28, 28], int64 [m]) of every user, in the file's order."""
    try:
        return [(user, *_convert_samples(x, y)) for user, x, y in read_users(path)]
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise unreadable_error(name, path, first_line(error)) from error


def _convert_samples(images: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.array(images, dtype=np.float64), to_integers("labels", labels)
    if x.ndim == 0:
        raise ValueError("images are no list")
    if len(x) != len(y):
        raise ValueError(f"{len(x)} images with {len(y)} labels")
    x = x.reshape(len(y), -1) if len(y) else np.zeros((0, SIDE * SIDE))
    if x.shape[1] != SIDE * SIDE:
        raise ValueError(f"images of {x.shape[1]} values, not {SIDE * SIDE}")
    if not np.all((x >= 0) & (x <= 1)):
        raise ValueError("values outside 0..1")
    if len(y) and not 0 <= y.min() <= y.max() < NUM_CLASSES:
        raise ValueError(f"labels {y.min()}..{y.max()}, allowed are 0..{NUM_CLASSES - 1}")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE), y
