"""The contract of transports: collective calls that broadcast and exchange bytes between ranks.

Every rank knows all sizes in advance (they follow from what an algorithm declares), so only payload travels.
All ranks make the same calls in the same order. Buffers are uint8, one-dimensional and contiguous unless stated.
"""

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias, TypeGuard, TypeVar, Union

import numpy as np

from pflmpi.errors import TransportError, show, write_exit_code
from pflmpi.transports.peers import Peer

if TYPE_CHECKING:
    import torch

Buffer: TypeAlias = Union[np.ndarray, "torch.Tensor"]  # tensors may be on a GPU
B = TypeVar("B", np.ndarray, Buffer)

SMALLEST_GPU_MESSAGE = 1 << 16  # bytes; smaller messages are faster between hosts than between GPUs
STAGED = 1 << 28  # bytes to or from each peer that are staged on a GPU at a time
_EMPTY = np.empty(0, np.uint8)
_HEAD_START = 3.0  # seconds for which rank 0 alone shows an error that all ranks have


class Transport(ABC):
    """Collective calls with rank 0 as the root; subclasses move the bytes.

    A call raises `TransportError` if a rank is lost or does not arrive within the time limit. After that only `abort`
    may be called.

    Attributes:
        rank: 0 to size - 1; rank 0 is the server.
        timeout: seconds that a call waits for the other ranks; may be changed between calls, equally on all ranks.
        peers: host and process of each rank; empty before `introduce`.
        device_buffers: whether this rank's MPI library can send GPU memory; None if it does not say.
        max_message: maximum bytes in one message, because MPI's counts and some of gloo's have 32 bits.
    """

    name: ClassVar[str]
    max_message: ClassVar[int] = 2**30
    device_buffers: bool | None = None

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._moved = 0, 0
        self._counts = False
        self.peers: list[Peer] = []
        self._closed = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the bytes that are moved inside the context, for `take_moved`."""
        previous, self._counts = self._counts, True
        try:
            yield
        finally:
            self._counts = previous

    def take_moved(self) -> tuple[int, int]:
        """Returns and resets the counted bytes: to clients, and from clients.

        Every rank counts the bytes of the whole group, as far as it knows the sizes; rank 0 knows all of them.
        """
        moved, self._moved = self._moved, (0, 0)
        return moved

    def _count(self, down: int = 0, up: int = 0) -> None:
        if self._counts:
            self._moved = self._moved[0] + down, self._moved[1] + up

    def broadcast(self, buffer: Buffer) -> None:
        """Copy rank 0's `buffer` into every rank's, which has the same size.

        Each rank may pass a tensor on its GPU if `takes_gpu_memory` of this size.
        """
        check_bytes(buffer)
        if self.size > 1 and len(buffer):
            self._broadcast(buffer)
        self._count(down=len(buffer) * (self.size - 1))

    def exchange(
        self,
        parts: dict[int, B],
        sizes: dict[int, int],
        moved: int,
        down: bool = False,
        empty: Callable[[int], B] | None = None,
    ) -> dict[int, B]:
        """Sends parts to ranks, and returns the received parts by sender; a part to itself is returned uncopied.

        Each rank may use GPU memory for any part, whatever the others do.

        Args:
            parts: bytes to send, by receiver, which may be this rank; none of them empty.
            sizes: bytes to receive, by sender, which may be this rank; none of them 0.
            moved: bytes that all ranks together send to others.
            down: count them as bytes to clients instead of from clients.
            empty: allocates a received part of so many bytes; by default `host_buffer`.
        """
        for part in parts.values():
            check_bytes(part)
        for ranks in (parts, sizes):
            assert all(0 <= rank < self.size for rank in ranks), f"ranks {list(ranks)} of {self.size}"
        own = len(parts.get(self.rank, ()))
        assert own == sizes.get(self.rank, 0), f"own part of {own} bytes, declared {sizes.get(self.rank, 0)}"
        assert all(map(len, parts.values())) and all(sizes.values()), "an empty part"
        make: Any = empty or self.host_buffer
        received: dict[int, B] = {
            rank: parts[rank] if rank == self.rank else make(size) for rank, size in sizes.items()
        }
        if self.size > 1:
            self._exchange_staged(
                {rank: part for rank, part in parts.items() if rank != self.rank},
                {rank: part for rank, part in received.items() if rank != self.rank},
            )
        self._count(down=moved if down else 0, up=0 if down else moved)
        return received

    def _exchange_staged(self, sent: Mapping[int, Buffer], received: Mapping[int, Buffer]) -> None:
        """Exchange parts; those on a GPU are staged on the host if the transport cannot take GPU memory."""

        def needs_host(part: Buffer, rank: int) -> "TypeGuard[torch.Tensor]":
            return not isinstance(part, np.ndarray) and not part.is_cpu and not self.takes_gpu_memory(len(part), rank)

        outgoing = {rank: part.cpu().numpy() if needs_host(part, rank) else part for rank, part in sent.items()}
        staged = {rank: self.host_buffer(len(part)) for rank, part in received.items() if needs_host(part, rank)}
        self._exchange(outgoing, {**received, **staged})
        for rank, part in received.items():
            if needs_host(part, rank):
                import torch

                part.copy_(torch.from_numpy(staged[rank]))

    def gather(self, part: Buffer, sizes: Sequence[int]) -> list[np.ndarray] | None:
        """All ranks' parts, of the given sizes in bytes, in rank order on rank 0; None elsewhere."""
        assert len(sizes) == self.size, f"{len(sizes)} sizes for {self.size} ranks"
        assert len(part) == sizes[self.rank], f"part of {len(part)} bytes, declared {sizes[self.rank]}"
        expected = {rank: size for rank, size in enumerate(sizes) if size} if self.rank == 0 else {}
        parts: dict[int, Any] = {0: part} if len(part) else {}
        received = self.exchange(parts, expected, sum(sizes[1:]))
        return [received.get(rank, _EMPTY) for rank in range(self.size)] if self.rank == 0 else None

    def maximum(self, values: np.ndarray) -> np.ndarray:
        """Elementwise maximum over ranks of float64 [M], on every rank; NaN if any is NaN."""
        assert values.dtype == np.float64 and values.ndim == 1, f"float64 [M], not {values.dtype} {values.shape}"
        parts = self.gather(values.view(np.uint8), [values.nbytes] * self.size)
        largest = values.copy() if parts is None else np.max([part.view(np.float64) for part in parts], 0)
        self.broadcast(largest.view(np.uint8))
        return largest

    def gather_texts(self, text: str) -> list[str] | None:
        """All ranks' texts, of any length, on rank 0; None elsewhere."""
        content = np.frombuffer(text.encode(), np.uint8).copy()
        lengths = self.gather(np.array([len(content)], np.int64).view(np.uint8), [8] * self.size)
        sizes = np.concatenate(lengths) if lengths is not None else np.empty(8 * self.size, np.uint8)
        self.broadcast(sizes)
        parts = self.gather(content, sizes.view(np.int64).tolist())
        return None if parts is None else [bytes(part).decode() for part in parts]

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text, of any length, on every rank; the texts of other ranks are ignored."""
        content = np.frombuffer(text.encode(), np.uint8).copy()
        length = np.array([len(content)], np.int64)
        self.broadcast(length.view(np.uint8))
        if self.rank != 0:
            content = np.empty(length[0], np.uint8)
        self.broadcast(content)
        return bytes(content).decode()

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            self._barrier()

    def host_buffer(self, size: int) -> np.ndarray:
        """Host memory for so many bytes to send or receive; pinned if they will be copied to or from a GPU."""
        return np.empty(size, np.uint8)

    def takes_gpu_memory(self, size: int, peer: int | None = None) -> bool:
        """Whether a broadcast of so many bytes, or a part to or from `peer`, may be in GPU memory.

        For a broadcast the answer is the same on every rank.
        """
        return False

    def use_gpus(self, ranks: Sequence[int], device: "torch.device") -> None:  # noqa: B027 (nothing to do without GPUs)
        """Send large messages from GPU to GPU from now on; every rank calls this once.

        Args:
            ranks: the ranks with a GPU: all, or all but rank 0.
            device: of this rank.
        """

    def close(self, goes_on: bool = False) -> None:
        """Disconnect, together with all other ranks; `goes_on`: this process may connect again later."""
        self._goes_on = goes_on
        if not self._closed:
            self._closed = True
            self._close()

    def exit(self, code: int) -> NoReturn:
        """Disconnect and end this process with the exit code.

        With several ranks this bypasses the interpreter's shutdown: torch may keep its group and gloo's threads alive
        after `close` (it does once torch.func.vmap was used), and such a thread can abort a process that succeeded.
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
    def _broadcast(self, buffer: Buffer) -> None:
        """Broadcast in place; the buffer is not empty."""

    @abstractmethod
    def _exchange(self, sent: dict[int, Buffer], received: dict[int, Buffer]) -> None:
        """Send parts by receiver and fill received parts by sender; no part is empty.

        Every rank makes the call, even with empty dicts. Messages between two ranks arrive in order. Parts are on the
        host, or on a GPU if `takes_gpu_memory` of their size.
        """

    @abstractmethod
    def _barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def _close(self) -> None:
        """Release the transport's resources; called once."""


def chunks(array: B, size: int) -> Iterator[B]:
    """Yields consecutive views of at most `size` bytes of the array [M]."""
    step = size // array.itemsize
    for start in range(0, len(array), step):
        yield array[start : start + step]


def check_bytes(buffer: Buffer) -> None:
    """Assert that a buffer is uint8 [M] and contiguous."""
    if isinstance(buffer, np.ndarray):
        assert buffer.dtype == np.uint8 and buffer.ndim == 1, f"uint8 [M], not {buffer.dtype} {buffer.shape}"
        assert buffer.flags.c_contiguous, "a contiguous buffer"
    else:
        assert buffer.element_size() == 1 and buffer.ndim == 1, f"uint8 [M], not {buffer.dtype} {buffer.shape}"
        assert buffer.is_contiguous(), "a contiguous buffer"


def exit_unconnected(rank: int, environ: Mapping[str, str], text: str) -> NoReturn:
    """End this process with an error from another thread, while the main one waits for ranks inside a library."""
    if rank == 0:
        write_exit_code(environ, TransportError.exit_code)
    else:
        time.sleep(_HEAD_START)
    show(TransportError(text), rank=rank)
    flush_output()
    os._exit(TransportError.exit_code)


def flush_output() -> None:
    """Flush stdout and stderr, which `os._exit` does not do."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
