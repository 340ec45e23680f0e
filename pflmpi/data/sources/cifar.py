"""CIFAR-10 and CIFAR-100: the Python pickles, read by torchvision after it has verified their checksums."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi.data.dataset import Dataset, assemble
from pflmpi.data.sources.base import download_lock, missing_error, unreadable_error


@dataclass(frozen=True)
class CifarSource:
    """One of the two CIFAR sets; `reader` is torchvision's class name, `folder` holds its files under ROOT.

    Pickles run code when opened; torchvision opens a file only if its MD5 is the published one.
    """

    name: str
    reader: str
    folder: str
    parts: tuple[str, ...]  # the files in the folder
    num_classes: int
    summary: str
    embedded: bool = False

    def files(self, root: Path) -> list[Path]:
        """Finds the batch files and the file of class names."""
        paths = [root / self.folder / part for part in self.parts]
        for path in paths:
            if not path.is_file():
                raise missing_error(self.name, path.parent, path.name, "set data.download: true")
        return paths

    def fetch(self, root: Path) -> None:
        """Downloads and unpacks the archive with torchvision."""
        with download_lock(self.name, root):
            self._class()(str(root), download=True)

    def read(self, root: Path) -> Dataset:
        """Reads the dataset with the fine labels, training samples first."""
        paths = self.files(root)
        try:
            train, test = (self._class()(str(root), train=train) for train in (True, False))
        # A pickle that passed its checksum is the published one; before that torchvision raises RuntimeError.
        except (RuntimeError, OSError) as error:
            raise unreadable_error(self.name, self._damaged(paths) or root / self.folder, error) from error
        images = np.ascontiguousarray(np.concatenate([train.data, test.data]).transpose(0, 3, 1, 2))
        labels = np.array([*train.targets, *test.targets], dtype=np.int64)
        return assemble(self.name, images, labels, np.arange(len(labels)) >= len(train.targets), self.num_classes)

    def _class(self) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.reader)

    def _damaged(self, paths: list[Path]) -> Path | None:
        """Finds the first file with a wrong checksum; torchvision only says that there is one."""
        from torchvision.datasets.utils import check_integrity

        reader = self._class()
        sums = dict([*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])])
        return next((path for path in paths if not check_integrity(path, sums.get(path.name))), None)


CIFAR10 = CifarSource(
    name="cifar10",
    reader="CIFAR10",
    folder="cifar-10-batches-py",
    parts=(*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"),
    num_classes=10,
    summary="60000 small photographs, 3x32x32, 10 classes",
)
CIFAR100 = CifarSource(
    name="cifar100",
    reader="CIFAR100",
    folder="cifar-100-python",
    parts=("train", "test", "meta"),
    num_classes=100,
    summary="60000 small photographs, 3x32x32, 100 (fine) classes",
)
