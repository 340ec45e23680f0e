"""What every transport can do: a few collective calls over ranks, with rank 0 as the root.

Every rank knows all sizes beforehand (they follow from what an algorithm declares), so only payload travels.
All ranks make the same calls in the same order. Buffers are uint8, one-dimensional and contiguous unless said.
"""

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, NoReturn

import numpy as np

from pflmpi.transports.counter import Channel, Counter
from pflmpi.transports.order import from_keys, to_keys
from pflmpi.transports.peers import Peer, names

_PEER = 96  # bytes of a peer's text
CHUNK = 2**30  # bytes in one message: MPI counts and some of gloo's are 32 bits wide


class Transport(ABC):
    """Collective calls over `size` ranks; a subclass moves the bytes, this class checks and counts them.

    A rank that was lost, and a rank that does not answer within the time limit, raise `TransportError`.
    After that only `abort` may be called.

    Attributes:
        name: which transport this is.
        rank: 0 to size - 1; rank 0 is the server.
        size: number of ranks.
        counter: payload bytes moved.
        timeout: seconds that a call waits for the other ranks; may be changed between calls, alike on all ranks.
        peers: host and process of each rank, once they have been introduced.
        fault_tolerant: whether the others can go on when a rank is lost.
    """

    name: ClassVar[str]
    fault_tolerant = False

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.peers: list[Peer] = []
        self.counter = Counter()
        self._closed = False

    def channel(self, name: Channel) -> AbstractContextManager[None]:
        """Count what is moved inside the context on a channel: "data" or "control" (the default)."""
        return self.counter.channel(name)

    def broadcast(self, buffer: np.ndarray) -> None:
        """Fill everybody's `buffer`, the same size everywhere, with the content of rank 0's."""
        _check(buffer)
        if self.size > 1 and len(buffer):
            self._broadcast(buffer)
        self.counter.add(down=len(buffer) * (self.size - 1))

    def scatter(self, parts: list[np.ndarray] | None, size: int) -> np.ndarray:
        """Return this rank's part, of `size` bytes, of the parts that rank 0 gives, one per rank.

        Rank 0 gets its own part back, not a copy; what other ranks give as `parts` is ignored. Ranks other than 0
        count their own part only.
        """
        if self.rank != 0:
            part = np.empty(size, np.uint8)
            self._receive("scatter", {0: part} if size else {})
            self.counter.add(down=size)
            return part
        assert parts is not None and len(parts) == self.size, f"one part for each of {self.size} ranks"
        for part in parts:
            _check(part)
        assert len(parts[0]) == size, f"rank 0's part has {len(parts[0])} bytes, declared {size}"
        if self.size > 1:
            self._send("scatter", {rank: parts[rank] for rank in range(1, self.size) if len(parts[rank])})
        self.counter.add(down=sum(len(part) for part in parts[1:]))
        return parts[0]

    def gather(self, part: np.ndarray, sizes: list[int]) -> list[np.ndarray] | None:
        """Return all ranks' parts, in the order of ranks, on rank 0; None elsewhere.

        Args:
            part: this rank's part; rank 0 gets its own back, not a copy.
            sizes: bytes of each rank's part.
        """
        _check(part)
        assert len(sizes) == self.size, f"{len(sizes)} sizes for {self.size} ranks"
        assert len(part) == sizes[self.rank], f"part of {len(part)} bytes, declared {sizes[self.rank]}"
        self.counter.add(up=sum(sizes[1:]))
        if self.rank != 0:
            self._send("gather", {0: part} if len(part) else {})
            return None
        parts = [part, *(np.empty(size, np.uint8) for size in sizes[1:])]
        if self.size > 1:
            self._receive("gather", {rank: parts[rank] for rank in range(1, self.size) if sizes[rank]})
        return parts

    def maximum(self, values: np.ndarray) -> np.ndarray:
        """Return the elementwise maximum over ranks, on every rank, with the same bits in every transport.

        The order is total: 0.0 is greater than -0.0, and a NaN is greater than anything, so it is not lost.

        Shapes: values float64 [M], result float64 [M].
        """
        assert values.dtype == np.float64 and values.ndim == 1, f"float64 [M], not {values.dtype} {values.shape}"
        keys = to_keys(values)
        if self.size > 1 and len(keys):
            self._maximum(keys)
        self.counter.add(up=values.nbytes * (self.size - 1))
        return from_keys(keys)

    def sum_int64(self, values: np.ndarray) -> np.ndarray | None:
        """Return the exact elementwise sum over ranks on rank 0, None elsewhere; `values` may be overwritten.

        The caller guarantees that no sum, in any order of ranks, leaves the range of int64.

        Shapes: values int64 [M], result int64 [M].
        """
        assert values.dtype == np.int64 and values.ndim == 1, f"int64 [M], not {values.dtype} {values.shape}"
        assert values.flags.c_contiguous and values.flags.writeable, "a contiguous array that may be overwritten"
        if self.size > 1 and len(values):
            self._sum(values)
        self.counter.add(up=self._sum_bytes(values.nbytes))
        return values if self.rank == 0 else None

    def barrier(self) -> None:
        """Return when every rank has called this."""
        if self.size > 1:
            self._barrier()

    def introduce(self, device: str, slots: int) -> None:
        """Tell all ranks where each of them runs.

        Args:
            device: "cpu" or "cuda", of this rank.
            slots: how many ranks can compute at once on this node.
        """
        buffer = np.frombuffer(Peer.here(device, slots).text(_PEER), np.uint8).copy()
        parts = self.gather(buffer, [_PEER] * self.size)
        everyone = np.concatenate(parts) if parts is not None else np.empty(_PEER * self.size, np.uint8)
        self.broadcast(everyone)
        self.peers = [Peer.read(bytes(text)) for text in everyone.reshape(self.size, _PEER)]

    def ended(self, patience: float = 0.0) -> str:
        """Return the ranks of this host whose processes have ended, for an error; "" if there is none.

        Args:
            patience: seconds to look again; a process that is killed closes its connections before it has ended.
        """
        end = time.monotonic() + patience
        while True:
            found = [rank for rank, peer in enumerate(self.peers) if peer.ended()]
            if found or time.monotonic() >= end:
                return names(found, self.peers)
            time.sleep(0.02)

    def drop_lost(self) -> list[int]:
        """Go on without the ranks that were lost; return which these were, before the others are numbered anew.

        Every rank that is left calls this, after a `RankLost`.

        Raises:
            TransportError: rank 0 is lost, and the server's state with it.
        """
        raise NotImplementedError(f"the {self.name} transport cannot go on without a rank")

    def close(self) -> None:
        """End in order, when all ranks do; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._close()

    def exit(self, code: int) -> NoReturn:
        """Close, and end this process with the exit code.

        Between ranks this goes past the interpreter's own end: torch may keep its group, and threads of gloo with it,
        beyond `close` (it does once torch.func.vmap was used), and such a thread can abort a process that did well.
        """
        self.close()
        flush_output()
        if self.size > 1:
            os._exit(code)
        raise SystemExit(code)

    @abstractmethod
    def abort(self, code: int) -> NoReturn:
        """Stop all ranks at once; this process ends with the exit code."""

    @abstractmethod
    def _broadcast(self, buffer: np.ndarray) -> None:
        """Broadcast in place; not empty."""

    @abstractmethod
    def _send(self, operation: str, parts: dict[int, np.ndarray]) -> None:
        """Send parts, none of them empty, to the ranks that receive them in the same call.

        In a scatter and a gather every rank either sends or receives; it may have nothing to send or receive.
        """

    @abstractmethod
    def _receive(self, operation: str, parts: dict[int, np.ndarray]) -> None:
        """Fill parts, none of them empty, with what the ranks send in the same call."""

    @abstractmethod
    def _maximum(self, keys: np.ndarray) -> None:
        """Put the elementwise maximum of int64 keys [M] in place on every rank; not empty."""

    @abstractmethod
    def _sum(self, values: np.ndarray) -> None:
        """Put the elementwise sum of int64 values [M] in place on rank 0; not empty."""

    def _sum_bytes(self, size: int) -> int:
        """Return the bytes that ranks send each other to sum buffers of `size` bytes."""
        return size * (self.size - 1)

    @abstractmethod
    def _barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def _close(self) -> None:
        """Release what the transport holds; called once."""


def chunks(array: np.ndarray, most: int = CHUNK) -> Iterator[np.ndarray]:
    """Yield views of at most so many bytes that make up the array [M]."""
    step = most // array.itemsize
    for start in range(0, len(array), step):
        yield array[start : start + step]


def flush_output() -> None:
    """Write out what was printed; a process that is stopped hard would lose it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _check(buffer: np.ndarray) -> None:
    assert buffer.dtype == np.uint8 and buffer.ndim == 1, f"uint8 [M], not {buffer.dtype} {buffer.shape}"
    assert buffer.flags.c_contiguous, "a contiguous buffer"
