"""Minibatches from the resident data: one client at a time, or padded for many lanes at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pflmpi.local import Batch
from pflmpi.task import Task


@dataclass(frozen=True)
class Pool:
    """All samples of a dataset, on the device of the rank."""

    images: Tensor  # [n, C, H, W] uint8
    labels: Tensor  # [n] int64


@dataclass(frozen=True)
class ClientBatches:
    """The batches of one client; each is read when it is due."""

    task: Task
    pool: Pool
    indices: Sequence[np.ndarray]  # sample indices of every batch

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Batch]:
        for index in self.indices:
            chosen = torch.from_numpy(index).to(self.pool.images.device)
            images = self.pool.images.index_select(0, chosen)
            yield Batch(self.task.prepare(images), self.pool.labels.index_select(0, chosen))


@dataclass(frozen=True)
class LaneBatches:
    """The batches of one lane inside a vmapped call."""

    task: Task
    images: Tensor  # [S, B, C, H, W] uint8
    labels: Tensor  # [S, B] int64
    weight: Tensor  # [S, B] float32, 0 for padding

    def __len__(self) -> int:
        return self.images.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            yield Batch(self.task.prepare(self.images[step]), self.labels[step], self.weight[step])


def lane_tensors(pool: Pool, lanes: Sequence[Sequence[np.ndarray]]) -> dict[str, Tensor]:
    """Return `images`, `labels` and `weight` with axes [L, S, B, ...], padded to the longest lane and batch."""
    steps = max((len(lane) for lane in lanes), default=0)
    width = max((len(batch) for lane in lanes for batch in lane), default=1)
    index = np.zeros((len(lanes), steps, width), np.int64)
    weight = np.zeros((len(lanes), steps, width), np.float32)
    for i, lane in enumerate(lanes):
        for s, batch in enumerate(lane):
            index[i, s, : len(batch)] = batch
            weight[i, s, : len(batch)] = 1
    device = pool.images.device
    flat = torch.from_numpy(index.reshape(-1)).to(device)
    return {
        "images": pool.images.index_select(0, flat).view(*index.shape, *pool.images.shape[1:]),
        "labels": pool.labels.index_select(0, flat).view(index.shape),
        "weight": torch.from_numpy(weight).to(device),
    }


def in_order(indices: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Return indices cut into batches in stored order."""
    return [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
