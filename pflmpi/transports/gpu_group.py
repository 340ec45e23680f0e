"""Large messages from GPU to GPU: ranks that have one each exchange them by NCCL, whether or not the server has one.

NCCL has run between ranks that share a GPU, not yet between GPUs. Tests without a GPU put gloo in its place.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pflmpi.transports.base import SMALLEST_GPU_MESSAGE, STAGED, Buffer

Backend = Literal["nccl", "gloo"]
Parts = dict[int, Buffer]  # by the rank at the other end

_NEVER = timedelta(days=7)  # nccl's own time limit ends the process silently; the transport has one of its own


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
