"""The samples that a rank computes with, resident on its device."""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pflmpi.data.dataset import Dataset

_COPIED = 2**25  # bytes of images at a time


@dataclass(frozen=True)
class Pool:
    """Samples of a dataset, on the device of the rank."""

    images: Tensor  # [n, C, H, W] uint8
    labels: Tensor  # [n] int64
    place_of: np.ndarray | None = None  # int64, of each sample of the dataset, -1 if it is not here; None: all are

    @classmethod
    def of(cls, dataset: Dataset, device: torch.device) -> "Pool":
        """All samples of a dataset, on a device."""
        with warnings.catch_warnings():  # the map is read-only; nothing here writes to it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            images = torch.from_numpy(dataset.images)
        return cls(images.to(device), torch.from_numpy(dataset.labels.copy()).to(device))

    @classmethod
    def of_some(cls, dataset: Dataset, device: torch.device, samples: np.ndarray) -> "Pool":
        """Some samples of a dataset, by their ascending indices, on a device; the host copies few of them at a time."""
        place_of = np.full(len(dataset.labels), -1)
        place_of[samples] = np.arange(len(samples))
        few, one = max(1, _COPIED // dataset.images[:1].nbytes), torch.from_numpy(dataset.images[samples[:1]])
        images = torch.empty(len(samples), *one.shape[1:], dtype=one.dtype, device=device)
        for first in range(0, len(samples), few):
            some = slice(first, first + few)
            images[some].copy_(torch.from_numpy(dataset.images[samples[some]]))
        return cls(images, torch.from_numpy(dataset.labels[samples]).to(device), place_of)

    def places(self, samples: np.ndarray) -> np.ndarray:
        """Where samples of the dataset are in the pool, in the same order."""
        if self.place_of is None:
            return samples
        found: np.ndarray = self.place_of[samples]
        assert (found >= 0).all(), "a rank has the samples of its own clients"
        return found

    @property
    def sample_size(self) -> int:
        """Numbers of one image."""
        return self.images.shape[1:].numel()
