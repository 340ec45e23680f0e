"""The contract of every transport: collective calls over ranks, with rank 0 as the root.

Every rank knows all sizes in advance (they follow from what an algorithm declares), so only payload travels.
All ranks make the same calls in the same order. Buffers are uint8, one-dimensional and contiguous unless stated.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np

from pflmpi.transports.counter import Channel, Counter
from pflmpi.transports.order import from_keys, to_keys
from pflmpi.transports.peers import Peer

if TYPE_CHECKING:
    import torch


class Transport(ABC):
    """Collective calls over `size` ranks; a subclass moves the bytes, this class checks and counts them.

    A lost rank, and a rank that does not answer within the time limit, raise `TransportError`.
    After that only `abort` may be called.

    Attributes:
        name: of the transport.
        rank: 0 to size - 1; rank 0 is the server.
        size: number of ranks.
        counter: payload bytes moved.
        timeout: seconds that a call waits for the other ranks; may be changed between calls, equally on all ranks.
        peers: host and process of each rank; empty before `introduce`.
        fault_tolerant: whether the other ranks can continue when one is lost.
        max_message: bytes in one message: MPI counts, and some of gloo's, are 32 bits wide.
    """

    name: ClassVar[str]
    max_message: ClassVar[int] = 2**30
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
        """Count what is moved inside the context on the channel "data" or "control" (the default)."""
        return self.counter.channel(name)

    def broadcast(self, buffer: np.ndarray) -> None:
        """Copy rank 0's `buffer` into every rank's, of the same size everywhere."""
        _check(buffer)
        if self.size > 1 and len(buffer):
            self._broadcast(buffer)
        self.counter.add(down=len(buffer) * (self.size - 1))

    def scatter(self, parts: list[np.ndarray] | None, size: int) -> np.ndarray:
        """This rank's part, of `size` bytes, of the parts that rank 0 gives, one per rank.

        Rank 0 gets its own part back, not a copy; other ranks' `parts` are ignored. Ranks other than 0 count only
        their own part.
        """
        if self.rank != 0:
            part = np.empty(size, np.uint8)
            self._exchange("scatter", {}, {0: part} if size else {})
            self.counter.add(down=size)
            return part
        assert parts is not None and len(parts) == self.size, f"one part for each of {self.size} ranks"
        for part in parts:
            _check(part)
        assert len(parts[0]) == size, f"rank 0's part has {len(parts[0])} bytes, declared {size}"
        if self.size > 1:
            self._exchange("scatter", {rank: parts[rank] for rank in range(1, self.size) if len(parts[rank])}, {})
        self.counter.add(down=sum(len(part) for part in parts[1:]))
        return parts[0]

    def gather(self, part: np.ndarray, sizes: list[int]) -> list[np.ndarray] | None:
        """All ranks' parts, of the given sizes in bytes, in rank order on rank 0; None elsewhere.

        Rank 0 gets its own part back, not a copy.
        """
        _check(part)
        assert len(sizes) == self.size, f"{len(sizes)} sizes for {self.size} ranks"
        assert len(part) == sizes[self.rank], f"part of {len(part)} bytes, declared {sizes[self.rank]}"
        self.counter.add(up=sum(sizes[1:]))
        if self.rank != 0:
            self._exchange("gather", {0: part} if len(part) else {}, {})
            return None
        parts = [part, *(np.empty(size, np.uint8) for size in sizes[1:])]
        if self.size > 1:
            self._exchange("gather", {}, {rank: parts[rank] for rank in range(1, self.size) if sizes[rank]})
        return parts

    def maximum(self, values: np.ndarray) -> np.ndarray:
        """Elementwise maximum over ranks of float64 [M], on every rank, with the same bits in every transport.

        The order is total: 0.0 is greater than -0.0, and a NaN is greater than anything, so it is not lost.
        """
        assert values.dtype == np.float64 and values.ndim == 1, f"float64 [M], not {values.dtype} {values.shape}"
        keys = to_keys(values)
        if self.size > 1 and len(keys):
            self._maximum(keys)
        self.counter.add(up=values.nbytes * (self.size - 1))
        return from_keys(keys)

    def sum_int64(self, values: np.ndarray) -> np.ndarray | None:
        """Exact elementwise sum over ranks of int64 [M] on rank 0, None elsewhere; `values` may be overwritten.

        The caller guarantees that no sum, in any order of ranks, leaves the range of int64.
        """
        assert values.dtype == np.int64 and values.ndim == 1, f"int64 [M], not {values.dtype} {values.shape}"
        assert values.flags.c_contiguous and values.flags.writeable, "a contiguous array that may be overwritten"
        if self.size > 1 and len(values):
            self._sum(values)
        self.counter.add(up=self._sum_bytes(values.nbytes))
        return values if self.rank == 0 else None

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            self._barrier()

    def use_gpus(self, ranks: Sequence[int], device: "torch.device") -> None:  # noqa: B027
        """Move large messages between GPUs, where the transport can; every rank calls this once.

        Args:
            ranks: those that have a GPU to themselves: all, or all but rank 0.
            device: of this rank.
        """

    def all_well(self, well: bool) -> bool:
        """Whether all ranks are well and none has been lost since: one answer for all that are left.

        Every rank calls this after a step that survivors repeat together; `well` is false after a `RankLost`.
        """
        return well

    def drop_lost(self) -> list[int]:
        """Continue without the lost ranks, renumbered, after `all_well` was false; gives the old ranks of the lost."""
        raise NotImplementedError(f"the {self.name} transport cannot continue without a rank")

    def close(self, goes_on: bool = False) -> None:
        """Disconnect, together with all other ranks, once; `goes_on`: this process may connect again."""
        self._goes_on = goes_on
        if not self._closed:
            self._closed = True
            self._close()

    @abstractmethod
    def abort(self, code: int) -> NoReturn:
        """Stop all ranks at once; this process ends with the exit code."""

    def _sum_bytes(self, size: int) -> int:
        """Bytes that ranks send each other to sum buffers of `size` bytes."""
        return size * (self.size - 1)

    @abstractmethod
    def _broadcast(self, buffer: np.ndarray) -> None:
        """Broadcast in place; not empty."""

    @abstractmethod
    def _exchange(self, operation: str, sent: dict[int, np.ndarray], received: dict[int, np.ndarray]) -> None:
        """Send and fill parts by the rank at the other end; no part is empty.

        Either dict or both may be empty, but every rank makes the call. Messages between two ranks arrive in order.
        """

    @abstractmethod
    def _maximum(self, keys: np.ndarray) -> None:
        """Replace int64 keys [M] by their elementwise maximum on every rank; not empty."""

    @abstractmethod
    def _sum(self, values: np.ndarray) -> None:
        """Replace int64 values [M] by their elementwise sum on rank 0; not empty."""

    @abstractmethod
    def _barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def _close(self) -> None:
        """Release what the transport holds; called once."""


def chunks(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Views of at most `size` bytes that together make up the array [M]."""
    step = size // array.itemsize
    for start in range(0, len(array), step):
        yield array[start : start + step]


def _check(buffer: np.ndarray) -> None:
    assert buffer.dtype == np.uint8 and buffer.ndim == 1, f"uint8 [M], not {buffer.dtype} {buffer.shape}"
    assert buffer.flags.c_contiguous, "a contiguous buffer"
