"""The transport over torch.distributed: gloo between hosts, and NCCL for large messages between GPUs.

NCCL has been tested between ranks that share a GPU, not yet between GPUs. Tests without a GPU replace it by gloo.
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
from pflmpi.transports.peers import check_alive, describe_ended, describe_ranks
from pflmpi.transports.torch_store import Arrivals, connect, find_address, is_hosted_by_rank_0
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

_NEVER = timedelta(days=7)  # NCCL's time limit would end the process silently; the transport has its own
_WITHOUT_NCCL = "runtime.between_gpus = 'host' does without it"
_EXIT_SECONDS = 0.5  # from the end of a connection to the end of its process
_LEEWAY = 1.0  # seconds after its own time limit in which the store raises, unless its process hangs


class TorchTransport(Transport):
    """The default group of torch.distributed, created here and destroyed by `close`.

    Args:
        launch: has the rendezvous `address`, unless torchrun's variables have it.
        timeout: seconds that the start and each call wait for the other ranks.

    Raises:
        TransportError: not all ranks arrived within the time limit.
    """

    name = "torch"

    def __init__(self, launch: Launch, timeout: float) -> None:
        super().__init__(launch.rank, launch.size, timeout)
        self._hosted = is_hosted_by_rank_0()
        self._limit = timeout  # the timeout that torch has
        self._arrivals: Arrivals | None = None
        self._gpus: GpuGroup | None = None
        meeting = f"the start at {find_address(launch)} by MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME"
        with self._translated_errors(meeting):
            store = call_within(timeout + _LEEWAY, lambda: connect(launch, timeout))
            call_within(timeout + _LEEWAY, lambda: _start_gloo(store, launch, timeout))
        self._arrivals = Arrivals(store, launch.rank, launch.size, self._hosted)

    def use_gpus(self, ranks: Sequence[int], device: torch.device, backend: Backend = "nccl") -> None:
        """Send large messages between the GPUs of these ranks; see the base class, and `GpuGroup` for the backend."""
        library = gpu_platform()[1]
        with self._call(f"the start of {library} ({_WITHOUT_NCCL})"):
            make = partial(GpuGroup, self.rank, ranks, device, self._wait, self._wait_for_gpu, backend)
            try:
                self._gpus = call_within(self.timeout + _LEEWAY, make)  # NCCL connects without a time limit
            except RuntimeError as error:
                if describe_ended(self.peers, _EXIT_SECONDS):
                    raise
                raise TransportError(
                    f"{library} does not start ({describe_error(error)}); NCCL_DEBUG=INFO says more, "
                    f"NCCL_SOCKET_IFNAME names its network, and {_WITHOUT_NCCL}"
                ) from error

    def host_buffer(self, size: int) -> np.ndarray:
        return super().host_buffer(size) if self._gpus is None else self._gpus.host_buffer(size)

    def takes_gpu_memory(self, size: int, peer: int | None = None) -> bool:
        """Whether NCCL moves so many bytes; see the base class."""
        return self._gpus is not None and self._gpus.carries(size) and (peer is None or peer in self._gpus.members)

    def abort(self, code: int) -> NoReturn:
        """End this process; the launcher stops the others, or they notice the lost connection."""
        flush_output()
        os._exit(code)  # the interpreter's shutdown would wait for ranks that never answer

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
                self._wait(work, timedelta(seconds=self.timeout))  # messages would have the timeout of the start

    def _barrier(self) -> None:
        with self._call("barrier"):  # a reduction of one number, which unlike torch's barrier has the usual timeout
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
        work.wait()  # on its own it would only order kernels

    @contextmanager
    def _call(self, operation: str) -> Iterator[None]:
        """Count a collective call, apply the current time limit, and translate torch's errors."""
        assert self._arrivals is not None
        self._arrivals.enter()
        if self.timeout != self._limit:
            _set_timeout(timedelta(seconds=self.timeout))
            self._limit = self.timeout
        with self._translated_errors(operation):
            yield

    @contextmanager
    def _translated_errors(self, operation: str) -> Iterator[None]:
        """Raise `TransportError` instead of torch's errors for a lost rank or a timeout."""
        start = time.monotonic()
        try:
            yield
        except WaitTimeout as timeout:
            raise TransportError(self._describe_timeout(operation, timeout.seconds)) from timeout
        except RuntimeError as error:  # the base of torch's distributed errors
            waited = time.monotonic() - start
            if waited >= 0.95 * self.timeout:  # gloo raises the same error for both
                raise TransportError(self._describe_timeout(operation, waited)) from error
            raise TransportError(describe_loss(operation, error, describe_ended(self.peers, _EXIT_SECONDS))) from error

    def _describe_timeout(self, operation: str, waited: float) -> str:
        if self._arrivals is not None:
            absent = self._arrivals.absent()
        else:  # at the start, all ranks wait for rank 0 if it hosts the store
            absent = [0] if self.rank != 0 and self._hosted else []
        return describe_timeout(operation, waited, describe_ranks(absent, self.peers))


def _start_gloo(store: Store, launch: Launch, timeout: float) -> None:
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.size, timeout=limit)


def _set_timeout(timeout: timedelta) -> None:
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:  # an older torch
        dist.distributed_c10d._set_pg_timeout(timeout)


class GpuGroup:
    """Ranks with a GPU each; if rank 0 is not a member, the first member passes its messages on.

    All ranks of the transport create the group together.

    Args:
        rank: this rank.
        ranks: the members, ascending.
        device: of this rank, if it is a member.
        wait: waits for a message between hosts.
        wait_for_gpu: waits for a call of the group.
        backend: "nccl"; "gloo" in tests without GPUs.
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
        nccl_device = device if backend == "nccl" and rank in ranks else None
        if nccl_device is not None:
            torch.cuda.set_device(nccl_device)  # for this thread, where the current GPU would be the first one
        group = dist.new_group(list(ranks), timeout=_NEVER, backend=backend, device_id=nccl_device)
        self._group = None if isinstance(group, int) else group  # torch returns a number to ranks that are no members
        self._rank, self._first, self._is_member = rank, ranks[0], rank in ranks
        self.members = frozenset(ranks)
        self._device, self._wait, self._wait_for_gpu = device, wait, wait_for_gpu
        self._wait_for_message = (
            wait_for_gpu if backend == "nccl" else wait
        )  # a message of gloo only completes in `wait`
        # NCCL connects in the first call, which all members must make; an exchange may not involve all of them.
        self._on_device(torch.zeros(1), lambda staged: dist.all_reduce(staged, group=self._group, async_op=True), False)

    def carries(self, size: int) -> bool:
        """Whether this group moves messages of so many bytes; the same on every rank."""
        return size >= SMALLEST_GPU_MESSAGE

    def host_buffer(self, size: int) -> np.ndarray:
        """Host memory; pinned if a GPU will copy it, because pageable memory takes three times as long."""
        return torch.empty(
            size, dtype=torch.uint8, pin_memory=self._device.type == "cuda" and self.carries(size)
        ).numpy()

    def broadcast(self, buffer: Tensor) -> None:
        """Copy rank 0's buffer into every rank's; each is on the host or on the rank's GPU."""
        if self._first != 0 and self._rank in (0, self._first):
            host = buffer if buffer.is_cpu else torch.empty(len(buffer), dtype=buffer.dtype, pin_memory=True)
            self._forward(host, 0, self._first)
            if host is not buffer:
                buffer.copy_(host, non_blocking=True)
        self._on_device(
            buffer,
            lambda staged: dist.broadcast(staged, src=self._first, group=self._group, async_op=True),
            changed=self._rank != 0,
        )

    def exchange(self, sent: Parts, received: Parts) -> tuple[Parts, Parts]:
        """Move the large parts between members, in host or GPU memory; returns the remaining parts of both dicts."""
        outgoing, other_sent = self._split(sent)
        incoming, other_received = self._split(received)
        longest = max(map(len, [*outgoing.values(), *incoming.values()]), default=0)
        for start in range(0, longest, STAGED):  # both ends of a message cut it at the same offsets
            self._exchange_staged(_cut(outgoing, start), _cut(incoming, start))
        return other_sent, other_received

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
        """Splits parts into those that this group moves, and the others."""
        members = self.members if self._is_member else frozenset()
        large = {rank: as_tensor(part) for rank, part in parts.items() if rank in members and self.carries(part.nbytes)}
        return large, {rank: part for rank, part in parts.items() if rank not in large}

    def _forward(self, buffer: Tensor, source: int, target: int) -> None:
        if self._rank == source:
            self._wait(dist.isend(buffer, target))
        elif self._rank == target:
            self._wait(dist.irecv(buffer, source))

    def _on_device(self, buffer: Tensor, start: Callable[[Tensor], dist.Work | None], changed: bool) -> None:
        """Call the group with the buffer on the device; copy the result back if the call has `changed` it."""
        if self._is_member:
            staged = buffer.to(self._device)
            self._wait_for_gpu(start(staged))
            if changed and staged is not buffer:
                buffer.copy_(staged)


def _cut(parts: dict[int, Tensor], start: int) -> dict[int, Tensor]:
    """Returns up to `STAGED` bytes from `start` of each part that is long enough."""
    return {rank: part[start : start + STAGED] for rank, part in parts.items() if start < len(part)}


def as_tensor(chunk: Buffer) -> Tensor:
    """Returns the chunk as a tensor, on the same memory unless it is read-only."""
    if isinstance(chunk, Tensor):
        return chunk
    return torch.from_numpy(chunk if chunk.flags.writeable else chunk.copy())  # torch warns of read-only memory
