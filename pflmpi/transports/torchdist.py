"""The transport over torch.distributed: gloo between hosts, and NCCL for large messages between GPUs.

NCCL has run between ranks that share a GPU, not yet between GPUs. Tests without a GPU put gloo in its place.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from pflmpi.errors import TransportError
from pflmpi.machine import gpu_platform
from pflmpi.transports.base import SMALLEST_GPU_MESSAGE, STAGED, Buffer, Transport, chunks, flush_output
from pflmpi.transports.detect import Launch
from pflmpi.transports.peers import check_alive, ended, names
from pflmpi.transports.torch_store import Arrivals, check_interfaces, connect, is_hosted_by_rank_0
from pflmpi.transports.waiting import (
    SHORTEST_PAUSE,
    WaitTimeout,
    call_within,
    describe_error,
    describe_loss,
    describe_timeout,
    wait,
)

Backend = Literal["nccl", "gloo"]
Parts = dict[int, Buffer]  # by the rank at the other end

_NEVER = timedelta(days=7)  # nccl's own time limit ends the process silently; the transport has one of its own
_WITHOUT_NCCL = "runtime.between_gpus = 'host' does without it"
_EXIT_SECONDS = 0.5  # seconds from the end of a connection to that of the process
_LEEWAY = 1.0  # seconds after its own time limit in which the store says so, unless its process hangs


class TorchTransport(Transport):
    """The default group of torch.distributed, created here and destroyed by `close`.

    Args:
        launch: this process; the ranks meet at its `address`, or where torchrun's variables say.
        timeout: seconds that a call waits for the other ranks, and that the start waits for all to arrive.

    Raises:
        TransportError: not all ranks arrived within the time limit.
    """

    name = "torch"

    def __init__(self, launch: Launch, timeout: float) -> None:
        super().__init__(launch.rank, launch.size, timeout)
        self._hosted = is_hosted_by_rank_0()
        self._limit = timeout  # that torch knows of
        self._arrivals: Arrivals | None = None
        self._gpus: GpuGroup | None = None
        check_interfaces("GLOO_SOCKET_IFNAME")
        with self._translated_errors("the start"):
            store = call_within(timeout + _LEEWAY, lambda: connect(launch, timeout))
            call_within(timeout + _LEEWAY, lambda: _start_gloo(store, launch, timeout))
        self._arrivals = Arrivals(store, launch.rank, launch.size, self._hosted)

    def use_gpus(self, ranks: Sequence[int], device: torch.device, backend: Backend = "nccl") -> None:
        """Move large messages between the GPUs of these ranks; see the base class, and `GpuGroup` for the backend."""
        if backend == "nccl":
            check_interfaces("NCCL_SOCKET_IFNAME")
        library = gpu_platform()[1]
        with self._call(f"the start of {library} ({_WITHOUT_NCCL})"):
            make = partial(GpuGroup, self.rank, ranks, device, self._wait, self._wait_for_gpu, backend)
            try:
                self._gpus = call_within(self.timeout + _LEEWAY, make)  # NCCL connects without any time limit
            except RuntimeError as error:
                if ended(self.peers, _EXIT_SECONDS):
                    raise
                raise TransportError(
                    f"{library} does not start ({describe_error(error)}); NCCL_DEBUG=INFO says more, and "
                    f"{_WITHOUT_NCCL}"
                ) from error

    def host_buffer(self, size: int) -> np.ndarray:
        return super().host_buffer(size) if self._gpus is None else self._gpus.host_buffer(size)

    def takes_gpu_memory(self, size: int, peer: int | None = None) -> bool:
        """Whether NCCL moves as many bytes; see the base class."""
        return self._gpus is not None and self._gpus.carries(size) and (peer is None or peer in self._gpus.members)

    def abort(self, code: int) -> NoReturn:
        """End this process; the launcher stops the others, and those that wait for it lose their connection."""
        flush_output()
        os._exit(code)  # an orderly exit would wait for ranks that never answer

    def _broadcast(self, buffer: Buffer) -> None:
        with self._call("broadcast"):
            for chunk in map(as_tensor, chunks(buffer, self.max_message)):
                if self._gpus and self._gpus.carries(buffer.nbytes):
                    self._gpus.broadcast(chunk)
                else:
                    self._wait(dist.broadcast(chunk, src=0, async_op=True))

    def _exchange(self, sent: dict[int, Buffer], received: dict[int, Buffer]) -> None:
        with self._call("exchange"):
            sent, received = self._gpus.exchange(sent, received) if self._gpus else (sent, received)
            works = [
                move(as_tensor(chunk), rank)
                for move, parts in ((dist.isend, sent), (dist.irecv, received))
                for rank, part in parts.items()
                for chunk in chunks(part, self.max_message)
            ]
            for work in works:
                self._wait(work, timedelta(seconds=self.timeout))  # messages have the limit of the group's start

    def _barrier(self) -> None:
        with self._call("barrier"):  # a reduction of one number, which has the time limit of other calls
            self._wait(dist.all_reduce(as_tensor(np.zeros(1)), async_op=True))

    def _close(self) -> None:
        self.barrier()  # no rank leaves while another still reads from it
        with self._translated_errors("the end"):
            if self._arrivals is not None:
                self._arrivals.close()
            dist.destroy_process_group()

    def _wait(self, work: dist.Work | None, limit: timedelta | None = None) -> None:
        assert work is not None, "only ranks of a group call it"
        work.wait(limit) if limit else work.wait()

    def _wait_for_gpu(self, work: dist.Work | None) -> None:
        assert work is not None, "only ranks of a group call it"
        wait(work.is_completed, self.timeout, longest=SHORTEST_PAUSE, check=lambda: check_alive(self.peers))
        work.wait()  # which alone would only order kernels

    @contextmanager
    def _call(self, operation: str) -> Iterator[None]:
        """Count a call that all ranks make, and apply the current time limit to it."""
        assert self._arrivals is not None
        self._arrivals.enter()
        if self.timeout != self._limit:
            _set_timeout(timedelta(seconds=self.timeout))
            self._limit = self.timeout
        with self._translated_errors(operation):
            yield

    @contextmanager
    def _translated_errors(self, operation: str) -> Iterator[None]:
        """Raise `TransportError` for what torch raises on a lost rank or a time-out."""
        start = time.monotonic()
        try:
            yield
        except WaitTimeout as up:
            raise TransportError(self._late(operation, up.seconds)) from up
        except RuntimeError as error:  # the base of torch's distributed errors
            waited = time.monotonic() - start
            late = waited >= 0.95 * self.timeout  # gloo raises the same error for both
            text = (
                self._late(operation, waited)
                if late
                else describe_loss(operation, error, ended(self.peers, _EXIT_SECONDS))
            )
            raise TransportError(text) from error

    def _late(self, operation: str, waited: float) -> str:
        if self._arrivals is not None:
            absent = self._arrivals.absent()
        else:  # the start: all wait for rank 0, where it hosts the store
            absent = [0] if self.rank != 0 and self._hosted else []
        return describe_timeout(operation, waited, names(absent, self.peers))


def _start_gloo(store: Store, launch: Launch, timeout: float) -> None:
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.size, timeout=limit)


def _set_timeout(timeout: timedelta) -> None:
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:  # before torch 2.15
        dist.distributed_c10d._set_pg_timeout(timeout)


class GpuGroup:
    """Ranks with a GPU each; if rank 0 is not among them, the first of them stands between it and the others.

    Args:
        rank: this rank; all ranks of the transport create the group together.
        ranks: the members, ascending.
        device: of this rank, if it is a member.
        wait: waits for a message between hosts.
        wait_for_gpu: waits for a call of the group.
        backend: "nccl"; "gloo" where a test has no GPUs.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        device: torch.device,
        wait: Callable[[dist.Work | None], None],
        wait_for_gpu: Callable[[dist.Work | None], None],
        backend: Backend,
    ) -> None:
        own = device if backend == "nccl" and rank in ranks else None
        if own is not None:
            torch.cuda.set_device(own)  # of this thread alone, where it is the first GPU, for every rank
        group = dist.new_group(list(ranks), timeout=_NEVER, backend=backend, device_id=own)
        self._group = None if isinstance(group, int) else group  # a number on ranks that are not in it
        self._rank, self._first, self._is_member = rank, ranks[0], rank in ranks
        self.members = frozenset(ranks)
        self._device, self._wait, self._wait_for_gpu = device, wait, wait_for_gpu
        self._wait_for_message = wait_for_gpu if backend == "nccl" else wait  # gloo's ends in `wait` alone
        # NCCL connects in the first call, which all members must make; not all of them have something to exchange.
        self._on_device(torch.zeros(1), lambda staged: dist.all_reduce(staged, group=self._group, async_op=True), False)

    def carries(self, size: int) -> bool:
        """Whether a message of so many bytes takes this way; the same on every rank."""
        return size >= SMALLEST_GPU_MESSAGE

    def host_buffer(self, size: int) -> np.ndarray:
        """Memory of the host; pinned for what the GPU will copy: pageable memory takes three times as long."""
        return torch.empty(
            size, dtype=torch.uint8, pin_memory=self._device.type == "cuda" and self.carries(size)
        ).numpy()

    def broadcast(self, buffer: Tensor) -> None:
        """Copy rank 0's buffer into every rank's; each is on the host or on the GPU of its rank."""
        if self._first != 0 and self._rank in (0, self._first):
            passed = buffer if buffer.is_cpu else torch.empty(len(buffer), dtype=buffer.dtype, pin_memory=True)
            self._pass(passed, 0, self._first)
            if passed is not buffer:
                buffer.copy_(passed, non_blocking=True)
        self._on_device(
            buffer,
            lambda staged: dist.broadcast(staged, src=self._first, group=self._group, async_op=True),
            changed=self._rank != 0,
        )

    def exchange(self, sent: Parts, received: Parts) -> tuple[Parts, Parts]:
        """Move the large parts between members, each from and to the host or the GPU; gives the others of both."""
        outgoing, sent = self._split(sent)
        incoming, received = self._split(received)
        most = max(map(len, [*outgoing.values(), *incoming.values()]), default=0)
        for start in range(0, most, STAGED):  # both ends of a message cut it alike
            self._exchange_staged(_cut(outgoing, start), _cut(incoming, start))
        return sent, received

    def _exchange_staged(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        staged = {
            rank: torch.empty(len(part), dtype=part.dtype, device=self._device) if part.is_cpu else part
            for rank, part in incoming.items()
        }
        moves = [dist.P2POp(dist.isend, part.to(self._device), rank, self._group) for rank, part in outgoing.items()]
        moves += [dist.P2POp(dist.irecv, part, rank, self._group) for rank, part in staged.items()]
        for work in dist.batch_isend_irecv(moves):
            self._wait_for_message(work)
        for rank, part in incoming.items():
            if part is not staged[rank]:
                part.copy_(staged[rank])

    def _split(self, parts: Parts) -> tuple[dict[int, Tensor], Parts]:
        """The parts that take this way, and the others."""
        members = self.members if self._is_member else frozenset()
        large = {rank: as_tensor(part) for rank, part in parts.items() if rank in members and self.carries(part.nbytes)}
        return large, {rank: part for rank, part in parts.items() if rank not in large}

    def _pass(self, buffer: Tensor, source: int, target: int) -> None:
        if self._rank == source:
            self._wait(dist.isend(buffer, target))
        elif self._rank == target:
            self._wait(dist.irecv(buffer, source))

    def _on_device(self, buffer: Tensor, start: Callable[[Tensor], dist.Work | None], changed: bool) -> None:
        """Call the group with the buffer on the device; copy the result back where it has `changed`."""
        if self._is_member:
            staged = buffer.to(self._device)
            self._wait_for_gpu(start(staged))
            if changed and staged is not buffer:
                buffer.copy_(staged)


def _cut(parts: dict[int, Tensor], start: int) -> dict[int, Tensor]:
    """At most `STAGED` bytes of each part, of those that are so long."""
    return {rank: part[start : start + STAGED] for rank, part in parts.items() if start < len(part)}


def as_tensor(chunk: Buffer) -> Tensor:
    """The chunk as a tensor on the same memory."""
    if isinstance(chunk, Tensor):
        return chunk
    return torch.from_numpy(chunk if chunk.flags.writeable else chunk.copy())  # torch warns of read-only memory
