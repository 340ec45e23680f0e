"""The MNIST family: idx files, plain or compressed."""

import gzip
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pflmpi.data.array_files import check_memory, read_npz
from pflmpi.data.dataset import Dataset, assemble
from pflmpi.data.numbers import to_integers
from pflmpi.data.sources.base import download_lock, missing_error, unreadable_error
from pflmpi.errors import DataError
from pflmpi.text import first_line

KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")
UNSIGNED_BYTES = 0x08  # the type of the values, in the third byte of the file


@dataclass(frozen=True)
class IdxSource:
    """One dataset of the MNIST family, under ROOT/<folder>/raw; `folder` is also torchvision's class name."""

    name: str
    folder: str
    summary: str
    num_classes: int = 10
    parts: tuple[str, str] = ("train", "t10k")  # how the names of the files begin, of training and test samples
    split: str | None = None  # torchvision's name of one of several datasets in an archive
    transposed: bool = False  # whether rows and columns are exchanged in the files, and put right here
    embedded: bool = False

    def files(self, root: Path) -> list[Path]:
        """Finds the four idx files (plain before compressed), and writers.npz if it exists."""
        raw = root / self.folder / "raw"
        paths = []
        for stem in (f"{part}-{kind}" for part in self.parts for kind in KINDS):
            path = next((path for path in (raw / stem, raw / f"{stem}.gz") if path.is_file()), None)
            if path is None:
                raise missing_error(self.name, raw, f"{stem} (or {stem}.gz)", "set data.download: true")
            paths.append(path)
        writers = root / self.folder / "writers.npz"
        return [*paths, writers] if writers.is_file() else paths

    def fetch(self, root: Path) -> None:
        """Downloads the files with torchvision."""
        with download_lock(self.name, root):
            from torchvision import datasets

            which = {} if self.split is None else {"split": self.split}
            getattr(datasets, self.folder)(str(root), **which, download=True)

    def read(self, root: Path) -> Dataset:
        """Reads the dataset, with writers if ROOT/<folder>/writers.npz exists."""
        files = self.files(root)
        train_x, train_y, test_x, test_y = (self._read(path) for path in files[:4])
        for path, x, y in ((files[1], train_x, train_y), (files[3], test_x, test_y)):
            if len(x) != len(y):
                raise unreadable_error(self.name, path, f"labels {list(y.shape)} for images {list(x.shape)}")
            if y.max(initial=0) >= self.num_classes:
                raise unreadable_error(self.name, path, f"label {y.max()}, allowed are 0..{self.num_classes - 1}")
        if train_x.shape[1:] != test_x.shape[1:]:
            raise unreadable_error(
                self.name, files[2], f"images {list(test_x.shape)}, training ones {list(train_x.shape)}"
            )
        labels = np.concatenate([train_y, test_y]).astype(np.int64)
        images = np.concatenate([train_x, test_x])[:, None]
        images = np.ascontiguousarray(images.swapaxes(2, 3)) if self.transposed else images
        writers = self._writers(files[4], train_y, test_y) if len(files) > 4 else None
        return assemble(self.name, images, labels, np.arange(len(labels)) >= len(train_y), self.num_classes, writers)

    def _read(self, path: Path) -> np.ndarray:
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                return _read_idx(file, 3 if "images" in path.name else 1)
        except Exception as error:  # gzip raises many kinds for damaged bytes
            raise unreadable_error(self.name, path, first_line(error)) from error

    def _writers(self, path: Path, train_y: np.ndarray, test_y: np.ndarray) -> np.ndarray:
        """Reads the writer of each sample int64 [n], training first; the file must have these labels."""
        try:
            names = ("train_writer", "test_writer", "train_label", "test_label")
            train, test, *labels = read_npz(path, names).values()
        except (OSError, ValueError) as error:
            raise unreadable_error(self.name, path, error) from error
        for writers, described, expected in zip((train, test), labels, (train_y, test_y), strict=True):
            if writers.shape != expected.shape or not np.array_equal(described, expected):
                raise DataError(
                    f"dataset {self.name!r}: {path} describes other samples than the idx files beside it; delete it"
                )
        try:
            return np.concatenate([to_integers("writers", train), to_integers("writers", test)])
        except ValueError as error:
            raise unreadable_error(self.name, path, error) from error


def _read_idx(file: BinaryIO | gzip.GzipFile, dimensions: int) -> np.ndarray:
    """Reads the unsigned bytes in an idx file, no more of them than its header says."""
    header = file.read(4)
    if header != bytes([0, 0, UNSIGNED_BYTES, dimensions]):
        raise ValueError(f"it is no idx file of unsigned bytes with {dimensions} dimensions: it begins with {header!r}")
    shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
    length = math.prod(shape)
    check_memory(length)
    content = file.read(length)
    if len(content) < length or file.read(1):
        raise ValueError(f"its head says {length} values, and it has {'more' if len(content) == length else 'fewer'}")
    return np.frombuffer(content, np.uint8).reshape(shape)


MNIST = IdxSource("mnist", "MNIST", "70000 handwritten digits, 1x28x28, 10 classes")
FASHION_MNIST = IdxSource("fashion_mnist", "FashionMNIST", "70000 pieces of clothing, 1x28x28, 10 classes")
EMNIST = IdxSource(
    "emnist",
    "EMNIST",
    "814255 characters, 1x28x28, 62 classes (FEMNIST without writers)",
    num_classes=62,
    parts=("emnist-byclass-train", "emnist-byclass-test"),
    split="byclass",
    transposed=True,
)
