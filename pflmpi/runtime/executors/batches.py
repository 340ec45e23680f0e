"""The samples of a rank on its device, and batches of them, for one client or padded for many lanes."""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pflmpi.data.dataset import Dataset
from pflmpi.data.splits import group_by_owner
from pflmpi.learning.client import Batch, Padding, StoredBatches
from pflmpi.learning.task import Task
from pflmpi.learning.transforms import Transform
from pflmpi.runtime.contract import ChangedInPlace
from pflmpi.runtime.executors.transfers import upload
from pflmpi.tree import ALIGNED, Tree, leaf
from pflmpi.vmap_lanes import in_lanes_of, of_all_lanes, outside_vmap

_MAX_COPIED = 2**25  # bytes of images that the host copies at a time
_MAX_PREPARED = 2**25  # bytes of images that are prepared at a time
_FEATURE_BATCH = 32  # samples whose features are computed in one call

Samples = tuple[Tensor, Tensor]  # images [..., C, H, W] uint8 and labels [...] int64


def cumcount(owner: np.ndarray) -> np.ndarray:
    """Returns [n] how many earlier entries have the same value, as `cumcount` of pandas.

    >>> cumcount(np.array([5, 2, 5, 5, 2]))
    array([0, 0, 1, 2, 1])
    """
    order = np.argsort(owner, kind="stable")
    turn = np.empty_like(order)
    turn[order] = np.arange(len(owner)) - np.searchsorted(owner[order], owner[order])
    return turn


@dataclass(frozen=True)
class Pool:
    """Samples of a dataset, on the rank's device, or on the host and copied for each call."""

    images: Tensor  # [n, C, H, W] uint8, or samples of other shapes
    labels: Tensor  # [n] int64, or [n, ...] for other tasks than classification
    held: np.ndarray | None = None  # [n] int64, ascending indices of these samples in the dataset; None for all
    goes_to: torch.device | None = None  # the rank's device, if the samples are on the host; see `on_device`

    @classmethod
    def of(cls, dataset: Dataset, device: torch.device) -> "Pool":
        """All samples of a dataset, on a device."""
        with warnings.catch_warnings():  # the memory map is read-only, and nothing here writes to it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            images = torch.from_numpy(dataset.images)
        return cls(images.to(device), torch.from_numpy(dataset.labels.copy()).to(device))

    @classmethod
    def of_some(cls, dataset: Dataset, device: torch.device, samples: np.ndarray) -> "Pool":
        """The samples with the given ascending indices, on a device; the host copies few of them at a time."""
        count, like = max(1, _MAX_COPIED // dataset.images[:1].nbytes), torch.from_numpy(dataset.images[samples[:1]])
        images = torch.empty(len(samples), *like.shape[1:], dtype=like.dtype, device=device)
        for first in range(0, len(samples), count):
            part = slice(first, first + count)
            images[part].copy_(torch.from_numpy(dataset.images[samples[part]]))
        return cls(images, torch.from_numpy(dataset.labels[samples]).to(device), samples)

    @classmethod
    def of_features(cls, dataset: Dataset, task: Task, samples: np.ndarray | None = None) -> "Pool":
        """Features [n, ..., d] of a frozen body instead of samples, on the task's device.

        Bits may depend on the size of a call and on a sample's position in it, which aligns its row. Both are fixed, so
        that features do not depend on the other samples of the rank.

        Args:
            samples: ascending indices; None for all.
        """
        samples = np.arange(len(dataset.labels)) if samples is None else samples
        features = torch.empty(len(samples), *task.feature_shape, device=task.device)
        position, call = samples % _FEATURE_BATCH, cumcount(samples % _FEATURE_BATCH)
        with torch.no_grad():
            for rows in group_by_owner(np.arange(len(samples)), call, call.max(initial=-1) + 1):
                batch = np.full(_FEATURE_BATCH, samples[rows[0]])
                batch[position[rows]] = samples[rows]
                images = torch.from_numpy(dataset.images[batch])
                features[rows] = task.features({}, task.prepare(images.to(task.device)))[position[rows]]
        return cls(features, torch.from_numpy(dataset.labels[samples]).to(task.device), samples)

    def places(self, samples: np.ndarray) -> np.ndarray:
        """Positions in the pool of the samples with the given indices in the dataset."""
        if self.held is None:
            return samples
        places = np.searchsorted(self.held, samples)
        assert np.array_equal(self.held.take(places, mode="clip"), samples), "a rank has the samples of its own clients"
        return places

    def on_device(self, samples: Sequence[np.ndarray]) -> "Pool":
        """The pool itself; if its samples are on the host, a pool of the given ones on the device.

        The first sample of the dataset is always included, because it pads the batches of lanes.
        """
        if self.goes_to is None:
            return self
        held = np.unique(np.concatenate([np.zeros(1, np.int64), *samples]))
        index = torch.from_numpy(self.places(held))
        values: Tree = {"images": self.images.index_select(0, index), "labels": self.labels.index_select(0, index)}
        uploaded = upload(values, self.goes_to)
        return Pool(leaf(uploaded, "images"), leaf(uploaded, "labels"), held)

    @property
    def device(self) -> torch.device:
        return self.goes_to or self.images.device

    @property
    def sample_size(self) -> int:
        """Number of values in one image."""
        return self.images.shape[1:].numel()


@dataclass(frozen=True)
class ClientBatches(StoredBatches):
    task: Task
    pool: Pool
    order: Tensor  # [n] int64, sample indices of all batches, on the device of the pool
    sizes: list[int]  # [S] samples of each batch
    keys: Tensor | None = None  # [S] int64
    smoothing: float = 0.0  # of the labels
    transform: Transform | None = None
    draws: Tensor | None = None  # [S] int64, keys of the transform; None: no sample is changed

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Batch]:
        keys, together = _unbind_keys(self.keys, len(self)), self._count_together()
        starts = [0, *itertools.accumulate(self.sizes)]
        for first in range(0, len(self), together):
            sizes = self.sizes[first : first + together]
            index = self.order[starts[first] : starts[first + len(sizes)]]
            images = self._prepare(self.pool.images.index_select(0, index), sizes, first)
            labels = torch.split(self.pool.labels.index_select(0, index), sizes)
            for x, y, key in zip(images, labels, keys[first : first + together], strict=True):
                versions = x._version, y._version
                yield Batch(x, y, None, key, self.smoothing)
                if (x._version, y._version) != versions:
                    raise ChangedInPlace("batch.y" if x._version == versions[0] else "batch.x")

    def with_features(self, split: StoredBatches, features: Tensor, labels: Tensor) -> "ClientBatches | None":
        if self.draws is not None or not isinstance(split, ClientBatches):
            return None
        task, pool = self.task.replace(cached_features=True), Pool(features, labels)
        return replace(self, task=task, pool=pool, order=find_places(split.order, self.order))

    def _prepare(self, images: Tensor, sizes: list[int], first: int) -> Sequence[Tensor]:
        """Returns the model's inputs for consecutive batches, the first of which has the number `first`."""
        if self.transform is None or self.draws is None:
            return list(align_batches(torch.split(self.task.prepare(images), sizes)))
        draws = self.draws[first:].unbind(0)
        parts = zip(torch.split(images, sizes), draws, strict=False)
        return [self.task.prepare(self.transform(part, key)) for part, key in parts]

    def _count_together(self) -> int:
        """Number of batches prepared at once: many on a GPU, to save operations; one on a CPU, to stay in cache."""
        if self.pool.images.is_cpu:
            return 1
        return max(1, _MAX_PREPARED // (4 * max(self.sizes, default=1) * self.pool.sample_size))


@dataclass(frozen=True)
class LaneBatches(StoredBatches):
    """The batches of one lane inside a vmapped call.

    As much as possible is computed once for a whole pass, because each operation inside the call costs as much as the
    arithmetic of a small model.
    """

    task: Task
    gather: Callable[[], Samples]  # [S, B, ...], called for the first batch
    weight: Tensor  # [S, B] float32, 0 for padding
    full_steps: int  # steps before the shortest lane ends
    together: int  # number of steps whose images are prepared at once
    keys: Tensor | None = None  # [S] int64
    smoothing: float = 0.0  # of the labels
    transform: Transform | None = None
    draws: Tensor | None = None  # [S] int64, keys of the transform; None: no sample is changed
    index: Tensor | None = None  # [S, B] int64, positions of the samples in the pool; None if unknown
    inputs: Callable[[Tensor], Tensor] | None = None  # gathered samples -> model inputs; None for `task.prepare`

    def __len__(self) -> int:
        return self.weight.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        images, labels = self.gather()
        samples = self.weight.sum(1, keepdim=True)
        share = self.weight / samples.clamp(min=1)
        active = (samples.squeeze(1) > 0).to(self.weight.dtype).unbind(0)
        parts = (self._prepare(images), labels.unbind(0), self.weight.unbind(0), share.unbind(0))
        targets: Sequence[Tensor | None] = [None] * len(self)
        if self.task.kind.classes:
            classes = torch.arange(self.task.num_classes, device=labels.device)
            one_hot = (labels.unsqueeze(-1) == classes).to(self.weight.dtype)
            targets = (one_hot * -share.unsqueeze(-1)).unbind(0)
        keys = _unbind_keys(self.keys, len(self))
        for step, (x, y, weight, mean, target, key) in enumerate(zip(*parts, targets, keys, strict=True)):
            padding = Padding(weight, mean, target, None if step < self.full_steps else active[step])
            yield Batch(x, y, padding, key, self.smoothing)

    def with_features(self, split: StoredBatches, features: Tensor, labels: Tensor) -> "LaneBatches | None":
        if self.draws is not None or self.index is None or not isinstance(split, LaneBatches) or split.index is None:
            return None
        with outside_vmap():
            index, split_index = map(of_all_lanes, (self.index, split.index))
            all_places = find_places(split_index.flatten(1), index.flatten(1)).view_as(index)
            together = max(1, _MAX_PREPARED * len(features) // (of_all_lanes(features).nbytes * index.shape[2]))
        places = in_lanes_of(all_places, self.index)

        def rows(values: Tensor, places: Tensor) -> Tensor:
            return values[places.flatten()].view(*places.shape, *values.shape[1:])

        inputs = functools.partial(rows, features)
        return replace(self, gather=lambda: (places, rows(labels, places)), inputs=inputs, together=together)

    def _prepare(self, images: Tensor) -> Iterator[Tensor]:
        if self.transform is not None and self.draws is not None:
            for batch, key in zip(images.unbind(0), self.draws.unbind(0), strict=True):
                yield self.task.prepare(self.transform(batch, key))
            return
        inputs = self.inputs or self.task.prepare
        for batches in torch.split(images, self.together):
            yield from align_batches(inputs(batches).unbind(0))


def align_batches(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields consecutive parts of a tensor, on a GPU with the alignment of newly allocated memory.

    Kernels are selected by alignment, and a captured step reads its batch from newly allocated memory.
    """
    offset = 0
    for part in parts:
        yield part if part.is_cpu or offset % ALIGNED == 0 else part.clone()
        offset += part.nbytes


@dataclass(frozen=True)
class LanePass:
    """The batches of all lanes, padded to the longest lane and the widest batch.

    Attributes:
        places: on the host: `index` [L, S, B] int64 into the pool; `weight` [L, S, B] float32, 0 for padding; `keys`
            [L, S] int64 if noise is drawn; `draws` [L, S] int64 if samples are transformed.
        full_steps: steps before the shortest lane ends.
    """

    places: Tree
    full_steps: int


def pad_lanes(pool: Pool, lanes: Sequence[Sequence[np.ndarray]]) -> LanePass:
    """Pads the lanes' batches of samples to one shape, with the first sample of the pool.

    Args:
        lanes: by lane and batch, indices in the dataset.
    """
    sizes = np.zeros((len(lanes), max(map(len, lanes), default=0)), np.int64)
    for row, lane in zip(sizes, lanes, strict=True):
        row[: len(lane)] = [*map(len, lane)]
    is_real = np.arange(sizes.max(initial=1)) < sizes[..., None]
    index = np.zeros(is_real.shape, np.int64)
    index[is_real] = np.concatenate([np.empty(0, np.int64), *itertools.chain.from_iterable(lanes)])
    weight = is_real.astype(np.float32)
    places: Tree = {"index": torch.from_numpy(pool.places(index)), "weight": torch.from_numpy(weight)}
    return LanePass(places, min(map(len, lanes), default=0))


def gather_samples(pool: Pool, index: Tensor) -> Samples:
    """Returns the samples [L, S, B, ...] of all lanes from their places [L, S, B], on the pool's device."""
    labels = pool.labels.index_select(0, index.view(-1))
    return gather_images(pool, index), labels.view(*index.shape, *labels.shape[1:])


def gather_images(pool: Pool, index: Tensor) -> Tensor:
    shape = pool.images.shape[1:]
    if index.is_cpu:
        return pool.images.index_select(0, index.view(-1)).view(*index.shape, *shape)
    # The memory layout is [S, B, L, C, H, W], which a grouped convolution of all lanes takes without a copy.
    lanes_last = index.permute(1, 2, 0)
    return pool.images.index_select(0, lanes_last.reshape(-1)).view(*lanes_last.shape, *shape).movedim(2, 0)


def gather_in_lane(pool: Pool, index: Tensor) -> Samples:
    """As `gather_samples` for one lane [S, B] inside a vmapped call; all lanes are gathered in one operation."""
    with outside_vmap():
        images, labels = gather_samples(pool, of_all_lanes(index))
    return in_lanes_of(images, index), in_lanes_of(labels, index)


def find_places(samples: Tensor, chosen: Tensor) -> Tensor:
    """Returns the positions in samples [..., n] of the chosen ones [..., m]; arbitrary for padding (0).

    >>> find_places(torch.tensor([7, 3, 5]), torch.tensor([5, 7, 5])).tolist()
    [2, 0, 2]
    """
    ascending, order = torch.sort(samples, stable=True)
    return order.gather(-1, torch.searchsorted(ascending, chosen))


def count_steps_at_once(pool: Pool, index: Tensor) -> int:
    """Returns the number of steps whose images are prepared at once, for places [L, S, B]."""
    return max(1, _MAX_PREPARED // (4 * index.shape[0] * index.shape[2] * pool.sample_size))


def split_in_order(indices: np.ndarray, batch_size: int) -> list[np.ndarray]:
    return [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]


def _unbind_keys(keys: Tensor | None, steps: int) -> Sequence[Tensor | None]:
    return [None] * steps if keys is None else keys.unbind(0)
