"""Copies between the host and a GPU that overlap with its computing: on their own streams, ordered by events."""

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

MOST_MESSAGE_BYTES = 4 * 2**30  # bytes of a GPU that messages take until they are summed

T = TypeVar("T")


@dataclass(frozen=True)
class Streams:
    """The streams of a device.

    Attributes:
        up, down: of the copies to the device, and of those to the host; one would let a copy to the device wait for the
            results that are to be copied before it.
        current: the stream that computes.
        on: lets what follows be launched on a stream.
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
    """The streams of a device; None where copies need none."""
    make = STREAMS.get(device.type)
    return None if make is None else make(device)


def device_memory(device: torch.device) -> float:
    """Bytes of a device that this process may take; infinity where it is no GPU."""
    if device.type != "cuda":
        return math.inf
    memory = torch.cuda.get_device_properties(device).total_memory
    return memory * torch.cuda.get_per_process_memory_fraction(device)


def device_message_limit(device: torch.device) -> float:
    """Bytes of a device that the messages of a round may take: at most an eighth of this process's part of a GPU."""
    memory = device_memory(device)
    return memory if memory == math.inf else min(MOST_MESSAGE_BYTES, memory / 8)


def upload(value: Tree, device: torch.device) -> Tree:
    """A tree on a device as by `tree.to`; its copy waits for nothing, and what is then launched waits for it."""
    streams = find_streams(device)
    if streams is None:
        return tree.to(value, device)
    with streams.on(streams.up):
        uploaded = tree.to(value, device)
    current = streams.current()
    current.wait_stream(streams.up)
    for (_, before), (_, after) in zip(tree.leaves(value), tree.leaves(uploaded), strict=True):
        if after is not before:
            after.record_stream(current)  # its memory is not given away before what is launched there has read it
    return uploaded


def download(value: Tree, device: torch.device) -> Callable[[], Tree]:
    """Begin to copy a tree from a device to the host, as by `tree.to_host`, once what has been launched is computed.

    The result waits for that, and for nothing that is launched later.
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
        return tree.clone(pinned)  # so that few pinned buffers serve all units

    return wait


def download_all(values: Sequence[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
    """As `download`, of a list."""
    if device.type == "cpu":
        return lambda: [*values]
    done = download({f"{number:09}": value for number, value in enumerate(values)}, device)
    return lambda: [value for _, value in tree.leaves(done())]


def run_pipelined(begun: Iterable[Callable[[], T]], ahead: int) -> Iterator[T]:
    """The results of calls that have been begun, in order; one is waited for when `ahead` more have been begun."""
    waiting: deque[Callable[[], T]] = deque()
    for call in begun:
        waiting.append(call)
        if len(waiting) > ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


_UNKNOWN = torch.tensor(torch.nan)


@dataclass(frozen=True)
class Update:
    """Local updates of a group, on the host, with a leading client axis."""

    states: Tree  # their new states
    up: Messages  # their uplink; the messages that are folded are on the device
    loss: Tensor  # [m] float64, mean training loss of each; NaN where none was counted
    is_finite: bool  # whether all numbers of states and uplink are known to be finite


def download_update(results: Tree, kept: Collection[str], device: torch.device) -> Callable[[], Update]:
    """Begin to copy the results of a group to the host, but for the messages that stay on a device.

    Args:
        results: "state", "up" and "loss", with a leading client axis.
        kept: the names of these messages.
    """
    up = as_messages(tree.part(results, "up"))
    on_device = {name: tree.map(Tensor.detach, message) for name, message in up.items() if name in kept}
    if any(leaf.is_cpu for _, leaf in tree.leaves({**on_device})):
        on_device = {}
    sent: Tree = {**results, "up": {name: message for name, message in up.items() if name not in on_device}}
    done = download({**sent, "finiteness": _finiteness(results)}, device)

    def wait() -> Update:
        on_host = done()
        messages = {**as_messages(tree.part(on_host, "up")), **on_device}
        is_finite = bool(tree.leaf(on_host, "finiteness") == 0)
        return Update(tree.part(on_host, "state"), messages, tree.leaf(on_host, "loss"), is_finite)

    return wait


def _finiteness(results: Tree) -> Tensor:
    """0, if all numbers of states and messages are finite; NaN otherwise, and where some are on the host."""
    leaves = [leaf for part in ("state", "up") for _, leaf in tree.leaves(tree.part(results, part))]
    numbers = [leaf for leaf in leaves if leaf.is_floating_point()]
    if not numbers or any(leaf.is_cpu for leaf in numbers):
        return _UNKNOWN
    return torch.cat([leaf.detach().reshape(-1) for leaf in numbers]).mul_(0).sum()
