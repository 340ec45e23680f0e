"""Streams of the stub device that are not there: what is read or overwritten before it is known to be done is found."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import stub_device
from pflmpi.runtime.executors.transfers import STREAMS, Streams
from stub_device import StubDevice, StubTensor

Clock = dict[str, int]
Memory = tuple[bool, int]  # of the device, and where
_COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_}


@dataclass
class FakeStream:
    """A queue of work, or the host.

    Attributes:
        known: by name of a queue, how much of its work is done before what is launched here next.
        waits: for these, by `wait_stream`.
    """

    name: str
    known: Clock = field(default_factory=dict)
    waits: set[str] = field(default_factory=set)

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits.add(other.name)
        self.learn(other)

    def learn(self, other: "FakeStream") -> None:
        for name, count in other.known.items():
            self.known[name] = max(self.known.get(name, 0), count)

    def launch(self) -> tuple[str, int]:
        self.known[self.name] = self.known.get(self.name, 0) + 1
        return self.name, self.known[self.name]


class Timeline:
    """The queues of a device, and what was done in which order.

    Attributes:
        log: copies, waits of the host for results, and what a test adds.
        races: what was not ordered, in words.
    """

    def __init__(self) -> None:
        self.host, self.up, self.down, self.computing = map(FakeStream, ("host", "up", "down", "computing"))
        self.now = self.computing
        self.log, self.races = list[str](), list[str]()
        self._written: dict[Memory, tuple[str, int]] = {}
        self._read: dict[Memory, Clock] = {}
        self._kept: dict[Memory, set[str]] = {}
        self._used: dict[Memory, set[str]] = {}
        self._of: dict[Memory, str] = {}

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        if self.log[-1:] != [stream.name]:
            self.log.append(stream.name)
        yield
        self.now = before

    def record_event(self, stream: FakeStream) -> Any:
        event = FakeStream("event", dict(stream.known))

        def synchronize():
            self.log.append("wait")
            self.host.wait_stream(event)

        return mock.Mock(synchronize=synchronize)

    def keep(self, tensor: StubTensor, stream: FakeStream) -> None:
        """`Tensor.record_stream`."""
        self._kept.setdefault(_memory(tensor), set()).add(stream.name)

    def operation(self, func: Any, read: list[Tensor], written: list[Tensor], at: FakeStream) -> None:
        """Note an operation, and what it is not ordered after."""
        for tensor in [*read, *written]:
            if (before := self._written.get(_memory(tensor))) and at.known.get(before[0], 0) < before[1]:
                self.races.append(f"{func} on {at.name} does not wait for {before[0]}")
        for tensor in written:
            for name, count in self._read.get(_memory(tensor), {}).items():
                if at.known.get(name, 0) < count:
                    self.races.append(f"{func} on {at.name} overwrites what {name} may still read")
        place = at.launch()
        for tensor in read:
            self._read.setdefault(_memory(tensor), {})[place[0]] = place[1]
            if isinstance(tensor, StubTensor) and self._of.get(_memory(tensor), at.name) != at.name:
                self._used.setdefault(_memory(tensor), set()).add(at.name)
        for tensor in written:
            self._written[_memory(tensor)] = place

    def made(self, tensor: Tensor, at: FakeStream) -> None:
        """Memory that a queue has made."""
        self._end(_memory(tensor))
        for notes in (self._written, self._read):
            notes.pop(_memory(tensor), None)  # of a tensor that was there before
        self._of[_memory(tensor)] = at.name

    def end(self) -> None:
        """Note memory that another queue used than the one that made it, and that was not kept for it."""
        for memory in [*self._used]:
            self._end(memory)

    def _end(self, memory: Memory) -> None:
        for name in self._used.pop(memory, set()) - self._kept.pop(memory, set()):
            self.races.append(f"memory of {self._of[memory]} may be given away before {name} has used it")


def _memory(tensor):
    on_stub = isinstance(tensor, StubTensor)
    return on_stub, (tensor.values if on_stub else tensor).untyped_storage().data_ptr()


@contextmanager
def fake_streams():
    """Streams for the stub device; `stub_device.stub_device` then sees what is launched on which."""
    timeline = Timeline()
    for stream in (timeline.up, timeline.down, timeline.computing):
        stream.record_event = partial(timeline.record_event, stream)

    class OnStreams(StubDevice):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            before = {_memory(leaf) for leaf in inputs}
            out = super().__torch_dispatch__(func, types, args, kwargs)
            outputs = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
            on_stub = any(isinstance(leaf, StubTensor) for leaf in [*inputs, *outputs])
            at = timeline.now if on_stub else timeline.host
            if on_stub:
                at.learn(timeline.host)  # launched after all that the host has done
            new = [leaf for leaf in outputs if _memory(leaf) not in before]
            for leaf in new:
                timeline.made(leaf, at)
            changed = [leaf for leaf, spec in zip(args, func._schema.arguments, strict=False) if spec.is_write]
            written = [leaf for leaf in tree_flatten(changed)[0] if isinstance(leaf, Tensor)]
            read = [leaf for leaf in inputs if all(leaf is not changed_tensor for changed_tensor in written)]
            if not func.is_view:
                timeline.operation(func, read, [*written, *new], at)
            mixed = {isinstance(leaf, StubTensor) for leaf in [*inputs, *outputs] if leaf.ndim} == {True, False}
            if (
                mixed
                and func.overloadpacket in _COPIES
                and not ((kwargs or {}).get("non_blocking") or True in args[2:3])
            ):
                timeline.log.append("blocked")
                timeline.host.learn(at)
            return out

    streams = Streams(timeline.up, timeline.down, lambda: timeline.now, timeline.on)
    with (
        mock.patch.dict(STREAMS, {"stub": lambda _: streams}),
        mock.patch.object(stub_device, "StubDevice", OnStreams),
        mock.patch.object(
            StubTensor, "record_stream", lambda tensor, stream: timeline.keep(tensor, stream), create=True
        ),
    ):
        yield timeline
        timeline.end()
