"""How convolutions in lanes are computed: as one grouped convolution, or as one batched product of matrices."""

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pflmpi import tree
from pflmpi.learning.task import Task
from pflmpi.runtime.executors.transfers import upload
from pflmpi.runtime.stopwatch import seconds_of
from pflmpi.tree import Tree

WAYS = ("grouped", "im2col")
_REPEATS = 5


def convolutions(way: str) -> AbstractContextManager[object]:
    """Inside it, 2d convolutions are computed this way; any other way than "im2col" is torch's own."""
    return _Im2colMode() if way == "im2col" else contextlib.nullcontext()


def im2col(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
) -> Tensor:
    """`torch.nn.functional.conv2d` of images [B, C, H, W] with a weight [O, C, k, l], as one product of matrices.

    The windows of all images are the columns of a matrix [C k l, B P], for P places of the kernel: k l times the memory
    of the images. `vmap` makes of it one batched product, where it would make of a convolution a grouped one.
    """
    windows = F.unfold(x, weight.shape[2:], dilation, padding, stride)
    found = weight.flatten(1) @ windows.transpose(0, 1).flatten(1)
    if bias is not None:
        found = found + bias.to(found.dtype)[:, None]
    reach = _first(dilation) * (weight.shape[2] - 1)
    height = (x.shape[2] + 2 * _first(padding) - reach - 1) // _first(stride) + 1
    return found.view(len(found), len(x), height, -1).transpose(0, 1)


def fastest(tasks: Sequence[Task], lanes: int) -> str:
    """The way in which the convolutions of these tasks are faster on their device, by a short measurement.

    The gradient of a number by the models of that many clients, on a batch each; the ways take turns; medians of five.
    Which of two ways that are about as fast it is may be the other one next time. A way that needs more memory than the
    device has is not taken.

    Args:
        tasks: one per cohort.
        lanes: clients of a call.
    """
    seconds = dict.fromkeys(WAYS, 0.0)
    for task in [task for task in tasks if task.architecture.has_convolution]:
        step = _step(task, lanes)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _, way in product(range(1 + _REPEATS), WAYS):
            with convolutions(way):
                times[way].append(_seconds(step, task.device))
        for way, (_, *warm) in times.items():
            seconds[way] += statistics.median(warm)
    return min(WAYS, key=lambda way: seconds[way])


def _seconds(step: Callable[[], Tree], device: torch.device) -> float:
    """Seconds of a step; infinitely many where the device has too little memory for it."""
    try:
        return seconds_of(step, device)
    except torch.OutOfMemoryError:
        return math.inf


def _step(task: Task, lanes: int) -> Callable[[], Tree]:
    """Computes a gradient for each of some clients, as the executor does but without dropout and batch statistics."""

    def loss(model: Tree, images: Tensor) -> Tensor:
        return task.predict(model, images).square().mean()

    model = upload(tree.stack([task.of_client(client).init() for client in range(lanes)]), task.device)
    size = task.training.batch_size
    images = torch.zeros(lanes, size, *task.architecture.shape, device=task.device)
    return partial(torch.func.vmap(torch.func.grad(loss)), model, images)


class _Im2colMode(TorchFunctionMode):
    """Computes every 2d convolution by `im2col` that it can."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or the one that takes its place."""
        given = kwargs or {}
        if func is torch.conv2d and _is_plain(*args, **given):
            return im2col(*args[:6], **{name: value for name, value in given.items() if name != "groups"})
        return func(*args, **given)


def _is_plain(
    x: Tensor,
    weight: Tensor,
    bias: object = None,
    stride: object = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: int = 1,
) -> bool:
    """Whether a convolution is of a batch of images, without groups of its own and with padding in numbers."""
    return x.dim() == 4 and groups == 1 and not isinstance(padding, str)


def _first(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]
