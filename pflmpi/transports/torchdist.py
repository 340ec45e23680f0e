"""The transport over torch.distributed: gloo between CPUs, nccl where every rank has a GPU of its own."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pflmpi.errors import TransportError
from pflmpi.transports.base import Transport, chunks
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import ended, names
from pflmpi.transports.process_exit import flush_output
from pflmpi.transports.ring import piece, sum_bytes
from pflmpi.transports.torch_store import Arrivals, Backend, agreed_backend, connect
from pflmpi.transports.waiting import SHORTEST, TimeIsUp, lost, timed_out, wait

_DYING = 0.5  # seconds from the end of a connection to that of the process
_NCCL_GRACE = 60.0  # seconds: nccl's own watchdog ends the process silently, so our time limit must come first


class TorchTransport(Transport):
    """The default group of torch.distributed, created here and destroyed by `close`.

    Args:
        launch: this process; the ranks meet at its `address`, or where torchrun's variables say.
        timeout: seconds that a call waits for the other ranks, and that the start waits for all to arrive.
        backend: "nccl" moves payload from GPU to GPU; used if every rank has its own GPU and asks for it.
        device: the device of this rank, used by nccl.

    Raises:
        TransportError: not all ranks arrived within the time limit.
    """

    name = "torch"

    def __init__(self, launch: Launch, timeout: float, backend: Backend = "gloo", device: str = "cpu") -> None:
        super().__init__(launch.rank, launch.size, timeout)
        self._limit = timeout  # that torch knows of
        self._arrivals: Arrivals | None = None
        with self._translated_errors("the start"):
            store = connect(launch, timeout)
            self._backend = agreed_backend(backend, store, launch)
            nccl = self._backend == "nccl"
            self._grace = _NCCL_GRACE if nccl else 0.0
            self._device = torch.device(device if nccl else "cpu")
            dist.init_process_group(
                self._backend,
                store=store,
                rank=launch.rank,
                world_size=launch.size,
                timeout=timedelta(seconds=timeout + self._grace),
                device_id=self._device if nccl else None,  # connects now: a first message may not involve all ranks
            )
        self._arrivals = Arrivals(store, launch.rank, launch.size)

    def abort(self, code: int) -> NoReturn:
        """End this process; the launcher stops the others, and those that wait for it lose their connection."""
        flush_output()
        os._exit(code)  # an orderly exit would wait for ranks that never answer

    def _broadcast(self, buffer: np.ndarray) -> None:
        self._collective("broadcast", buffer, lambda staged: dist.broadcast(staged, src=0, async_op=True))

    def _maximum(self, keys: np.ndarray) -> None:
        self._collective("maximum", keys, lambda staged: dist.all_reduce(staged, dist.ReduceOp.MAX, async_op=True))

    def _sum(self, values: np.ndarray) -> None:
        size = piece(self.size) if self._backend == "gloo" else self.max_message
        self._collective("sum", values, lambda staged: dist.reduce(staged, dst=0, async_op=True), size)

    def _sum_bytes(self, size: int) -> int:
        return sum_bytes(size, self.size) if self._backend == "gloo" else super()._sum_bytes(size)

    def _barrier(self) -> None:
        # A reduction of one number: the same wait, with the same time limit, in both backends.
        self._collective("barrier", np.zeros(1), lambda staged: dist.all_reduce(staged, async_op=True))

    def _close(self) -> None:
        self.barrier()  # no rank leaves while another still reads from it
        assert self._arrivals is not None
        self._arrivals.close()
        with self._translated_errors("the end"):
            dist.destroy_process_group()

    def _collective(
        self, operation: str, array: np.ndarray, start: Callable[[Tensor], dist.Work | None], size: int | None = None
    ) -> None:
        """Start a collective call on each chunk of the array, and copy its result back into the array."""
        with self._call(operation):
            for chunk in chunks(array, min(size or self.max_message, self.max_message)):
                staged = self._stage(chunk)
                self._wait(start(staged))
                self._unstage(staged, chunk)

    def _exchange(self, operation: str, sent: dict[int, np.ndarray], received: dict[int, np.ndarray]) -> None:
        with self._call(operation):
            moves = [
                (move, rank, chunk, self._stage(chunk))
                for move, parts in ((dist.isend, sent), (dist.irecv, received))
                for rank, part in parts.items()
                for chunk in chunks(part, self.max_message)
            ]
            works: Sequence[dist.Work | None]
            if self._backend == "nccl" and moves:  # one group, or nccl would wait for each pair in turn
                works = dist.batch_isend_irecv([dist.P2POp(move, staged, rank) for move, rank, _, staged in moves])
            else:
                works = [move(staged, rank) for move, rank, _, staged in moves]
            for work in works:
                self._wait(work)
            for move, _, chunk, staged in moves:
                if move is dist.irecv:
                    self._unstage(staged, chunk)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "every rank is in the default group"
        if self._backend == "nccl":  # its own `wait` only orders kernels
            wait(work.is_completed, self.timeout, longest=SHORTEST)
        work.wait()

    @contextmanager
    def _call(self, operation: str) -> Iterator[None]:
        """Count a call that all ranks make, and apply the current time limit to it."""
        assert self._arrivals is not None
        self._arrivals.enter()
        if self.timeout != self._limit:
            _set_timeout(timedelta(seconds=self.timeout + self._grace))
            self._limit = self.timeout
        with self._translated_errors(operation):
            yield

    @contextmanager
    def _translated_errors(self, operation: str) -> Iterator[None]:
        """Raise `TransportError` for what torch raises on a lost rank or a time-out."""
        start = time.monotonic()
        try:
            yield
        except TimeIsUp as up:
            raise TransportError(self._late(operation, up.seconds)) from up
        except RuntimeError as error:  # the base of torch's distributed errors
            waited = time.monotonic() - start
            late = waited >= 0.95 * self.timeout  # gloo raises the same error for both
            text = self._late(operation, waited) if late else lost(operation, error, ended(self.peers, _DYING))
            raise TransportError(text) from error

    def _late(self, operation: str, waited: float) -> str:
        absent = self._arrivals.absent() if self._arrivals is not None else []
        return timed_out(operation, waited, names(absent, self.peers))

    def _stage(self, chunk: np.ndarray) -> Tensor:
        """The chunk as a tensor on the backend's device; on the CPU the memory is shared."""
        host = torch.from_numpy(chunk if chunk.flags.writeable else chunk.copy())  # torch warns of read-only memory
        return host.to(self._device)

    def _unstage(self, staged: Tensor, chunk: np.ndarray) -> None:
        if staged.device.type != "cpu" and chunk.flags.writeable:
            torch.from_numpy(chunk).copy_(staged)


def _set_timeout(timeout: timedelta) -> None:
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:  # before torch 2.15
        dist.distributed_c10d._set_pg_timeout(timeout)
