"""The transport over torch.distributed: gloo between CPUs, nccl where every rank has a GPU of its own."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed does not declare them

from pflmpi.errors import TransportError
from pflmpi.transports.arrivals import Arrivals
from pflmpi.transports.base import CHUNK, Transport, chunks, flush_output
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import names
from pflmpi.transports.ring import piece, sum_bytes
from pflmpi.transports.waiting import SHORTEST, TimeIsUp, lost, timed_out, wait

_DYING = 0.5  # seconds from the end of a connection to that of the process
_NCCL_GRACE = 60.0  # seconds: nccl's own watchdog ends the process without a word, so our time limit comes first


class TorchTransport(Transport):
    """The default group of torch.distributed, made here and given up by `close`.

    Args:
        launch: this process; where ranks meet comes from torchrun's variables unless it has an `address`.
        timeout: seconds that a call waits for the other ranks, and a start for all to come.
        backend: "nccl" moves payload from GPU to GPU; used if every rank has one of its own and asks for it.
        device: the device of this rank, used by nccl.

    Raises:
        TransportError: not all ranks came within the time limit.
    """

    name = "torch"

    def __init__(
        self, launch: Launch, timeout: float, backend: Literal["gloo", "nccl"] = "gloo", device: str = "cpu"
    ) -> None:
        super().__init__(launch.rank, launch.size, timeout)
        self._limit = timeout  # that torch knows of
        self._arrivals: Arrivals | None = None
        with self._losses("the start"):
            store = _store(launch, timeout)
            backend = _agreed(backend, store, launch)
            self._backend = backend
            self._grace = _NCCL_GRACE if backend == "nccl" else 0.0
            self._device = torch.device(device if backend == "nccl" else "cpu")
            dist.init_process_group(
                backend,
                store=store,
                rank=launch.rank,
                world_size=launch.size,
                timeout=timedelta(seconds=timeout + self._grace),
                device_id=self._device if backend == "nccl" else None,  # connects now: a first message may not need all
            )
        self._arrivals = Arrivals(store, launch.rank, launch.size)

    def abort(self, code: int) -> NoReturn:
        """End this process; the launcher stops the others, and those that wait for it lose their connection."""
        flush_output()
        os._exit(code)  # an orderly exit would wait for ranks that never answer

    def _broadcast(self, buffer: np.ndarray) -> None:
        self._collective("broadcast", buffer, lambda staged: dist.broadcast(staged, src=0, async_op=True))

    def _send(self, operation: str, parts: dict[int, np.ndarray]) -> None:
        self._exchange(operation, dist.isend, parts)

    def _receive(self, operation: str, parts: dict[int, np.ndarray]) -> None:
        self._exchange(operation, dist.irecv, parts)

    def _maximum(self, keys: np.ndarray) -> None:
        self._collective("maximum", keys, lambda staged: dist.all_reduce(staged, dist.ReduceOp.MAX, async_op=True))

    def _sum(self, values: np.ndarray) -> None:
        most = piece(self.size) if self._backend == "gloo" else CHUNK
        self._collective("sum", values, lambda staged: dist.reduce(staged, dst=0, async_op=True), most)

    def _sum_bytes(self, size: int) -> int:
        return sum_bytes(size, self.size) if self._backend == "gloo" else super()._sum_bytes(size)

    def _barrier(self) -> None:
        # One number for all: the same wait, with the same time limit, in both backends.
        self._collective("barrier", np.zeros(1), lambda staged: dist.all_reduce(staged, async_op=True))

    def _close(self) -> None:
        self.barrier()  # no rank leaves while another still reads from it
        assert self._arrivals is not None
        self._arrivals.close()
        with self._losses("the end"):
            dist.destroy_process_group()

    def _collective(
        self, operation: str, array: np.ndarray, start: Callable[[Tensor], dist.Work | None], most: int = CHUNK
    ) -> None:
        """Start a collective call on each chunk of the array, and bring what it makes back into the array."""
        with self._call(operation):
            for chunk in chunks(array, most):
                staged = self._stage(chunk)
                self._wait(start(staged))
                self._unstage(staged, chunk)

    def _exchange(
        self, operation: str, move: Callable[[Tensor, int], dist.Work | None], parts: dict[int, np.ndarray]
    ) -> None:
        """Send or receive parts by the rank at the other end; messages between two ranks arrive in order."""
        pairs = [(rank, chunk) for rank, part in parts.items() for chunk in chunks(part)]
        with self._call(operation):
            if not pairs:
                return
            staged = [self._stage(chunk) for _, chunk in pairs]
            works: Sequence[dist.Work | None]
            if self._backend == "nccl":  # one group, or nccl would wait for each pair in turn
                works = dist.batch_isend_irecv(
                    [dist.P2POp(move, tensor, rank) for (rank, _), tensor in zip(pairs, staged, strict=True)]
                )
            else:
                works = [move(tensor, rank) for (rank, _), tensor in zip(pairs, staged, strict=True)]
            for work in works:
                self._wait(work)
            if move is dist.irecv:
                for (_, chunk), tensor in zip(pairs, staged, strict=True):
                    self._unstage(tensor, chunk)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "every rank is in the default group"
        if self._backend == "nccl":  # its own `wait` only puts kernels in order
            wait(work.is_completed, self.timeout, longest=SHORTEST)
        work.wait()

    @contextmanager
    def _call(self, operation: str) -> Iterator[None]:
        """Count a call that all ranks make, with the time limit of now."""
        assert self._arrivals is not None
        self._arrivals.enter()
        if self.timeout != self._limit:
            _set_timeout(timedelta(seconds=self.timeout + self._grace))
            self._limit = self.timeout
        with self._losses(operation):
            yield

    @contextmanager
    def _losses(self, operation: str) -> Iterator[None]:
        """Phase what torch raises for a lost rank or a time-out into our error."""
        start = time.monotonic()
        try:
            yield
        except TimeIsUp as up:
            raise TransportError(self._late(operation, up.seconds)) from up
        except RuntimeError as error:  # the base of torch's distributed errors
            waited = time.monotonic() - start
            late = waited >= 0.95 * self.timeout  # gloo raises the same error for both
            text = self._late(operation, waited) if late else lost(operation, error, self.ended(_DYING))
            raise TransportError(text) from error

    def _late(self, operation: str, waited: float) -> str:
        absent = self._arrivals.absent() if self._arrivals is not None else []
        return timed_out(operation, waited, names(absent, self.peers))

    def _stage(self, chunk: np.ndarray) -> Tensor:
        """Return the chunk as a tensor where the backend needs it; on the CPU the memory is shared."""
        host = torch.from_numpy(chunk if chunk.flags.writeable else chunk.copy())  # torch warns of read-only memory
        return host.to(self._device)

    def _unstage(self, staged: Tensor, chunk: np.ndarray) -> None:
        if staged.device.type != "cpu" and chunk.flags.writeable:
            torch.from_numpy(chunk).copy_(staged)


def _store(launch: Launch, timeout: float) -> Store:
    """Return where the ranks of this start meet.

    Under torchrun the store outlives a restart, and with it the addresses of processes that have died; each start has
    names of its own. (torch's own meeting does not keep them apart and fails after a restart, up to 2.15 at least.)
    """
    host, _, port = (launch.address or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}").rpartition(":")
    hosted = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(host, int(port), is_master=hosted, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    return PrefixStore(f"pflmpi/{launch.restarts}", store)


def _agreed(backend: Literal["gloo", "nccl"], store: Store, launch: Launch) -> Literal["gloo", "nccl"]:
    """Return what all ranks can use: nccl only if every one of them has a GPU of its own."""
    store.set(f"backend/{launch.rank}", backend)
    if launch.rank == 0:
        wishes = [store.get(f"backend/{rank}") for rank in range(launch.size)]
        store.set("backend", "nccl" if all(wish == b"nccl" for wish in wishes) else "gloo")
    return "nccl" if store.get("backend") == b"nccl" else "gloo"


def _set_timeout(timeout: timedelta) -> None:
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:  # before torch 2.15
        dist.distributed_c10d._set_pg_timeout(timeout)
