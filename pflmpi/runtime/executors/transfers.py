"""Copies between host and GPU that overlap with computation: on streams of their own, ordered by events."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.messages.kinds import Messages, as_messages
from pflmpi.tree import Tree

MOST_MESSAGE_BYTES = 4 * 2**30  # upper limit of a GPU's memory for messages that wait to be summed

T = TypeVar("T")


@dataclass(frozen=True)
class Streams:
    """The streams of a device.

    Attributes:
        up, down: for copies to the device and to the host; on one stream, uploads would wait for earlier results.
        current: returns the stream that computes.
        on: context in which operations are launched on the given stream.
    """

    up: Any
    down: Any
    current: Callable[[], Any]
    on: Callable[[Any], AbstractContextManager[object]]


@cache
def _cuda(device: torch.device) -> Streams:
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return Streams(up, down, partial(torch.cuda.current_stream, device), torch.cuda.stream)


STREAMS: dict[str, Callable[[torch.device], Streams]] = {"cuda": _cuda}


def find_streams(device: torch.device) -> Streams | None:
    """Returns the streams of a device; None for a CPU."""
    make = STREAMS.get(device.type)
    return None if make is None else make(device)


def device_memory(device: torch.device) -> float:
    """Bytes of a GPU that this process may use; infinity for a CPU."""
    if device.type != "cuda":
        return math.inf
    memory = torch.cuda.get_device_properties(device).total_memory
    return memory * torch.cuda.get_per_process_memory_fraction(device)


def device_message_limit(device: torch.device) -> float:
    """Bytes of a GPU for messages that wait to be summed: at most an eighth of this process's part."""
    memory = device_memory(device)
    return memory if memory == math.inf else min(MOST_MESSAGE_BYTES, memory / 8)


def upload(value: Tree, device: torch.device) -> Tree:
    """As `tree.to`, without waiting for earlier operations; later ones wait for the copy."""
    streams = find_streams(device)
    if streams is None:
        return tree.to(value, device)
    with streams.on(streams.up):
        uploaded = tree.to(value, device)
    current = streams.current()
    current.wait_stream(streams.up)
    for (_, before), (_, after) in zip(tree.leaves(value), tree.leaves(uploaded), strict=True):
        if after is not before:
            after.record_stream(current)  # keeps its memory until operations on this stream have read it
    return uploaded


def download(value: Tree, device: torch.device) -> Callable[[], Tree]:
    """Start copying a tree to the host, as `tree.to_host`; call the result to wait for it.

    The copy follows the operations launched so far, and does not wait for later ones.
    """
    streams = find_streams(device)
    if streams is None:
        on_host = tree.to_host(value)
        return lambda: on_host

    def bring(packed: Tensor) -> Tensor:
        streams.down.wait_stream(streams.current())
        with streams.on(streams.down):
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=packed.is_cuda)
            host.copy_(packed, non_blocking=True)
        packed.record_stream(streams.down)
        return host

    pinned = tree.to_host(value, bring)
    arrived = streams.down.record_event()

    def wait() -> Tree:
        arrived.synchronize()
        return tree.clone(pinned)  # frees the pinned buffers for later downloads

    return wait


def download_all(values: Sequence[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
    """As `download`, for a list."""
    if device.type == "cpu":
        return lambda: [*values]
    wait = download({f"{number:09}": value for number, value in enumerate(values)}, device)
    return lambda: [value for _, value in tree.leaves(wait())]


def run_pipelined(calls: Iterable[Callable[[], T]], ahead: int) -> Iterator[T]:
    """Yields the results of started calls in order, waiting for each once `ahead` more have been started.

    Args:
        calls: starts a call at each step; each item waits for one.
    """
    pending: deque[Callable[[], T]] = deque()
    for wait in calls:
        pending.append(wait)
        if len(pending) > ahead:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


_UNKNOWN = torch.tensor(torch.nan)


@dataclass(frozen=True)
class Update:
    """Local updates of a group, with a leading client axis."""

    states: Tree  # new states, on the host
    up: Messages  # on the host, or on the device until they are summed
    loss: Tensor  # [m] float64, mean training loss; NaN if it was not measured
    is_finite: bool  # whether all numbers in `states` and `up` are known to be finite


def download_update(results: Tree, kept: Collection[str], device: torch.device) -> Callable[[], Update]:
    """Start copying the results of a group to the host; call the result to wait for it.

    Args:
        results: "state", "up" and "loss", with a leading client axis.
        kept: names of the messages that stay on the device.
    """
    up = as_messages(tree.part(results, "up"))
    on_device = {name: tree.map(Tensor.detach, message) for name, message in up.items() if name in kept}
    if any(leaf.is_cpu for _, leaf in tree.leaves({**on_device})):
        on_device = {}
    others: Tree = {**results, "up": {name: message for name, message in up.items() if name not in on_device}}
    wait_for_copy = download({**others, "finiteness": _finiteness(results)}, device)

    def wait() -> Update:
        on_host = wait_for_copy()
        messages = {**as_messages(tree.part(on_host, "up")), **on_device}
        is_finite = bool(tree.leaf(on_host, "finiteness") == 0)
        return Update(tree.part(on_host, "state"), messages, tree.leaf(on_host, "loss"), is_finite)

    return wait


def _finiteness(results: Tree) -> Tensor:
    """Returns 0 if all numbers of states and messages are finite; NaN if not, or if any are on the host."""
    leaves = [leaf for part in ("state", "up") for _, leaf in tree.leaves(tree.part(results, part))]
    numbers = [leaf for leaf in leaves if leaf.is_floating_point()]
    if not numbers or any(leaf.is_cpu for leaf in numbers):
        return _UNKNOWN
    return torch.cat([leaf.detach().reshape(-1) for leaf in numbers]).mul_(0).sum()
