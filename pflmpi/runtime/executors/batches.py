"""Minibatches from the resident data: one client at a time, or padded for many lanes at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pflmpi.learning.client import Batch, Padding
from pflmpi.learning.task import Task

_PREPARED = 2**25  # bytes of prepared images at a time


@dataclass(frozen=True)
class Pool:
    """All samples of a dataset, on the device of the rank."""

    images: Tensor  # [n, C, H, W] uint8
    labels: Tensor  # [n] int64


@dataclass(frozen=True)
class ClientBatches:
    """The batches of one client. A device is sent the indices of all at once, so that no step waits for the host."""

    task: Task
    pool: Pool
    indices: Sequence[np.ndarray]  # sample indices of every batch
    keys: Tensor | None = None  # [S] int64

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Batch]:
        if not len(self):
            return
        order = torch.from_numpy(np.concatenate(self.indices)).to(self.pool.images.device)
        parts = torch.split(order, [len(index) for index in self.indices])
        keys, together = _each(self.keys, len(self)), self._together()
        for first in range(0, len(self), together):
            due = parts[first : first + together]
            chosen = due[0] if len(due) == 1 else torch.cat(due)
            images = self.task.prepare(self.pool.images.index_select(0, chosen))
            labels = self.pool.labels.index_select(0, chosen)
            sizes = [len(part) for part in due]
            for x, y, key in zip(torch.split(images, sizes), torch.split(labels, sizes), keys[first:], strict=False):
                yield Batch(x, y, None, key)

    def _together(self) -> int:
        """Batches that are prepared at once: on a device many, to save operations; on the host one, while in cache."""
        if self.pool.images.is_cpu:
            return 1
        return max(1, _PREPARED // (4 * max(map(len, self.indices)) * self.pool.images[0].numel()))


@dataclass(frozen=True)
class LaneBatches:
    """The batches of one lane inside a vmapped call.

    What can be done for a whole pass at once is, because each operation inside the call costs as much as the
    arithmetic of a small model.
    """

    task: Task
    images: Tensor  # [S, B, C, H, W] uint8
    labels: Tensor  # [S, B] int64
    weight: Tensor  # [S, B] float32, 0 for padding
    full_steps: int  # steps before the shortest lane ends
    together: int  # steps whose images are prepared at once
    keys: Tensor | None = None  # [S] int64

    def __len__(self) -> int:
        return self.images.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        classes = torch.arange(self.task.num_classes, device=self.labels.device)
        one_hot = (self.labels.unsqueeze(-1) == classes).to(self.weight.dtype)
        samples = self.weight.sum(1, keepdim=True)
        share = self.weight / samples.clamp(min=1)
        active = (samples.squeeze(1) > 0).to(self.weight.dtype).unbind(0)
        parts = (self._images(), self.labels.unbind(0), self.weight.unbind(0), share.unbind(0))
        targets = (one_hot * -share.unsqueeze(-1)).unbind(0)
        keys = _each(self.keys, len(self))
        for step, (x, y, weight, mean, target, key) in enumerate(zip(*parts, targets, keys, strict=True)):
            yield Batch(x, y, Padding(weight, mean, target, None if step < self.full_steps else active[step]), key)

    def _images(self) -> Iterator[Tensor]:
        for images in torch.split(self.images, self.together):
            yield from self.task.prepare(images).unbind(0)


@dataclass(frozen=True)
class LaneTensors:
    """A pass of all lanes, padded to the longest lane and the widest batch."""

    images: Tensor  # [L, S, B, C, H, W] uint8
    labels: Tensor  # [L, S, B] int64
    weight: Tensor  # [L, S, B] float32, 0 for padding
    full_steps: int  # steps before the shortest lane ends
    together: int  # steps whose prepared images take `_PREPARED` bytes


def lane_tensors(pool: Pool, lanes: Sequence[Sequence[np.ndarray]]) -> LaneTensors:
    """The samples of every batch of every lane."""
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
    return LaneTensors(
        images=pool.images.index_select(0, flat).view(*index.shape, *pool.images.shape[1:]),
        labels=pool.labels.index_select(0, flat).view(index.shape),
        weight=torch.from_numpy(weight).to(device),
        full_steps=min((len(lane) for lane in lanes), default=0),
        together=max(1, _PREPARED // (4 * len(lanes) * width * pool.images[0].numel())),
    )


def in_order(indices: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Indices cut into batches in stored order."""
    return [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]


def _each(keys: Tensor | None, steps: int) -> Sequence[Tensor | None]:
    return [None] * steps if keys is None else keys.unbind(0)
