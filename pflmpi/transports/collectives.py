"""Collective calls over ranks, checked and counted: what every transport moves, and what it has to know to do so.

Every rank knows all sizes in advance (they follow from what an algorithm declares), so only payload travels.
All ranks make the same calls in the same order. Buffers are uint8, one-dimensional and contiguous unless stated.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, TypeVar

import numpy as np

from pflmpi.transports.counter import Channel, Counter
from pflmpi.transports.gpu.memory import Buffer, check_bytes

B = TypeVar("B", np.ndarray, Buffer)

_NAN = np.int64(0x7FF8000000000000)  # the one NaN that comes out, whichever went in
_ALL_BUT_SIGN = np.int64(0x7FFFFFFFFFFFFFFF)


class Collectives(ABC):
    """Calls by `size` ranks, with rank 0 as the root; a subclass moves the bytes.

    Attributes:
        rank: 0 to size - 1; rank 0 is the server.
        size: number of ranks.
        counter: payload bytes moved.
        max_message: bytes in one message: MPI counts, and some of gloo's, are 32 bits wide.
    """

    max_message: ClassVar[int] = 2**30

    def __init__(self, rank: int, size: int) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size
        self.counter = Counter()

    def channel(self, name: Channel) -> AbstractContextManager[None]:
        """Count what is moved inside the context on the channel "data", "checkpoint" or "control" (the default)."""
        return self.counter.channel(name)

    def takes_gpu_memory(self, size: int) -> bool:
        """Whether a broadcast of so many bytes may begin and end in the memory of GPUs; the same on every rank."""
        return False

    def broadcast(self, buffer: Buffer) -> None:
        """Copy rank 0's `buffer` into every rank's, of the same size everywhere.

        A rank may give a tensor on its GPU where the transport `takes_gpu_memory`, whatever the others give.
        """
        check_bytes(buffer)
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
            check_bytes(part)
        assert len(parts[0]) == size, f"rank 0's part has {len(parts[0])} bytes, declared {size}"
        if self.size > 1:
            self._exchange("scatter", {rank: parts[rank] for rank in range(1, self.size) if len(parts[rank])}, {})
        self.counter.add(down=sum(len(part) for part in parts[1:]))
        return parts[0]

    def gather(self, part: np.ndarray, sizes: list[int]) -> list[np.ndarray] | None:
        """All ranks' parts, of the given sizes in bytes, in rank order on rank 0; None elsewhere.

        Rank 0 gets its own part back, not a copy.
        """
        check_bytes(part)
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

    def all_to_all(
        self, parts: dict[int, np.ndarray], sizes: dict[int, int], moved: int, answers: bool = False
    ) -> dict[int, np.ndarray]:
        """What ranks have for this one, by rank; its own part is given back, not a copy.

        Args:
            parts: what this rank has for others, by rank, and for itself; none where it has nothing.
            sizes: bytes that ranks have for this one, by rank; likewise.
            moved: bytes that all ranks send to others.
            answers: count it as on the way to clients, not from them.
        """
        for part in parts.values():
            check_bytes(part)
        for who in (parts, sizes):
            assert all(0 <= rank < self.size for rank in who), f"ranks {list(who)} of {self.size}"
        own = len(parts.get(self.rank, ()))
        assert own == sizes.get(self.rank, 0), f"own part of {own} bytes, declared {sizes.get(self.rank, 0)}"
        assert all(map(len, parts.values())) and all(sizes.values()), "an empty part"
        received = {
            rank: parts[rank] if rank == self.rank else np.empty(size, np.uint8) for rank, size in sizes.items()
        }
        if self.size > 1:
            self._all_to_all(
                {rank: part for rank, part in parts.items() if rank != self.rank},
                {rank: part for rank, part in received.items() if rank != self.rank},
            )
        self.counter.add(down=moved if answers else 0, up=0 if answers else moved)
        return received

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

    def _sum_bytes(self, size: int) -> int:
        """Bytes that ranks send each other to sum buffers of `size` bytes."""
        return size * (self.size - 1)

    @abstractmethod
    def _broadcast(self, buffer: Buffer) -> None:
        """Broadcast in place; not empty."""

    @abstractmethod
    def _exchange(self, operation: str, sent: dict[int, np.ndarray], received: dict[int, np.ndarray]) -> None:
        """Send and fill parts by the rank at the other end; no part is empty.

        Either dict or both may be empty, but every rank makes the call. Messages between two ranks arrive in order.
        """

    def _all_to_all(self, sent: dict[int, np.ndarray], received: dict[int, np.ndarray]) -> None:
        """Like `_exchange`; any rank may send to any."""
        self._exchange("all-to-all", sent, received)

    @abstractmethod
    def _maximum(self, keys: np.ndarray) -> None:
        """Replace int64 keys [M] by their elementwise maximum on every rank; not empty."""

    @abstractmethod
    def _sum(self, values: np.ndarray) -> None:
        """Replace int64 values [M] by their elementwise sum on rank 0; not empty."""


def chunks(array: B, size: int) -> Iterator[B]:
    """Views of at most `size` bytes that together make up the array [M]."""
    step = size // array.itemsize
    for start in range(0, len(array), step):
        yield array[start : start + step]


def to_keys(values: np.ndarray) -> np.ndarray:
    """Keys int64 [M] in the order of the values float64 [M]: -inf < ... < -0.0 < 0.0 < ... < inf < NaN."""
    bits = values.astype(np.float64).view(np.int64)
    bits[np.isnan(values)] = _NAN
    return np.where(bits < 0, bits ^ _ALL_BUT_SIGN, bits)


def from_keys(keys: np.ndarray) -> np.ndarray:
    """Values float64 [M] of keys int64 [M]; the inverse of `to_keys`."""
    return np.where(keys < 0, keys ^ _ALL_BUT_SIGN, keys).view(np.float64)
