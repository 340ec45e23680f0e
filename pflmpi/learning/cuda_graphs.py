"""Training steps captured in CUDA graphs: one launch a step, on buffers of their own.

A captured step reads and writes fixed memory. So the state of a pass moves into buffers when its first captured step is
taken and back at its end, and each batch moves there before its step. Buffers and captures stay for later passes.

Nothing is believed of a capture: the first captured step is also taken as it is, and if one bit differs, or the capture
fails, the log says so once and steps are launched operation by operation.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflmpi.learning.program import Program
from pflmpi.tree import ALIGNED

Work = Callable[[], object]
Capture = Callable[[Work], Work]  # notes what the work launches, without running it; the result launches that again

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an entry
_log = logging.getLogger(__name__)


def cuda_graph(work: Work) -> Work:
    """CUDA graph of the work on the current GPU: one launch."""
    shared = _shared()
    return _graph(work, shared.stream, shared.pool).replay


def _graph(work: Work, stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # What other threads call meanwhile is no part of it, such as NCCL's, which looks for ranks that are lost.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the reason is the first error
                _end(graph, pool)
            raise
        _end(graph, pool)
    current.wait_stream(stream)
    return graph


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture; where it has failed, end the allocations for it too, which PyTorch (2.14) does not.

    As long as a capture is under way, no memory is given back that several streams have used.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # they had ended
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise


BY_DEVICE: dict[str, Capture] = {"cuda": cuda_graph}


def capture_on(device: torch.device) -> Capture | None:
    """Capture of training steps on a type of device; None if there is none."""
    return BY_DEVICE.get(device.type)


@cache  # one line for each reason in a process
def say_why_not(reason: str) -> None:
    """Say in the log, once, why a step is not captured."""
    _log.warning("a training step is not captured in a CUDA graph, but launched operation by operation: %s", reason)


class StaticBuffers:
    """Memory for the state of one kind of training, and the steps that are captured on it."""

    def __init__(self) -> None:
        self._state: list[Tensor] = []
        self._changed: Sequence[Tensor] = ()  # what `put_back` gives to the pass that is under way
        self._captured: dict[Program, tuple[list[Tensor], Work] | None] = {}

    def run(
        self,
        program: Program,
        batch: Sequence[Tensor],
        state: Sequence[Tensor],
        num_changed: int,
        capture: Capture,
    ) -> bool:
        """Take a step of a pass; False where steps of this program are not captured.

        Args:
            state: of the pass; `put_back` gives it what captured steps have made of it.
            num_changed: how many of these tensors, from the first on, a step may change.
        """
        if program not in self._captured:
            self.put_back()
            self._captured[program] = self._try(program, batch, state, num_changed, capture)
            return True
        captured = self._captured[program]
        if captured is None:
            self.put_back()
            return False
        self._load(state, num_changed)
        own, launch = captured
        _copy(own, batch)
        launch()
        return True

    def put_back(self) -> None:
        """Give the state of the pass what captured steps have made of it."""
        _copy(self._changed, self._state[: len(self._changed)])
        self._changed = ()

    def abandon(self) -> None:
        """Forget a pass that is under way; it gets nothing back."""
        self._changed = ()

    def _load(self, state: Sequence[Tensor], num_changed: int) -> None:
        if not self._changed:
            if not self._state:
                own = {id(tensor): _like(tensor, int(tensor.storage_offset())) for tensor in state}
                self._state = [own[id(tensor)] for tensor in state]  # two phases may have one sum of losses
            _copy(self._state, state)
            self._changed = state[:num_changed]

    def _try(
        self, program: Program, batch: Sequence[Tensor], state: Sequence[Tensor], num_changed: int, capture: Capture
    ) -> tuple[list[Tensor], Work] | None:
        """Take a step as it is and captured; the capture, with the state loaded, if both have the same bits."""
        captured, reason = None, ""
        if any(tensor.device != batch[0].device for tensor in (*batch, *state)):
            reason = "it reads a tensor of the host, whose value would be fixed"
        else:
            try:
                own = [_like(tensor, 0) for tensor in batch]
                self._load(state, num_changed)
                captured = own, capture(lambda: program.run(*own, *program.bind(*self._state)))
                _copy(own, batch)
                captured[1]()
            except RuntimeError as error:  # what torch raises, also for want of memory
                captured, reason = None, str(error).splitlines()[0]
        program.run(*batch, *program.bind(*state))
        if captured is not None and not _same_bits(self._state[:num_changed], state[:num_changed]):
            captured, reason = None, "the captured step has other bits"
        if captured is None:
            self.abandon()
        if reason:
            say_why_not(reason)
        return captured


def _like(tensor: Tensor, offset: int) -> Tensor:
    """New memory with the layout of a tensor, which begins as one at that offset, as far as kernels choose by it."""
    span = (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else 0
    )
    offset %= ALIGNED // tensor.element_size()
    memory = torch.empty(offset + span, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of one layout, those of a type in one call."""
    targets, sources = [*map(_stored, targets)], [*map(_stored, sources)]
    for dtype in dict.fromkeys(tensor.dtype for tensor in targets):
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _stored(tensor: Tensor) -> Tensor:
    """The tensor without repetitions: of an expanded axis, the entry that is in memory."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor
    shape = [size if stride else min(size, 1) for size, stride in zip(tensor.shape, strides, strict=True)]
    return tensor.as_strided(shape, strides)


def _same_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors have the same bits; waits for the device."""
    pairs = [[tensor.view(_BITS[tensor.element_size()]) for tensor in pair] for pair in zip(some, others, strict=True)]
    return bool(torch.stack([(tensor == other).all() for tensor, other in pairs]).all())


class _Shared(NamedTuple):
    """Stream and memory shared by all graphs of this process, which run one after another."""

    stream: torch.cuda.Stream  # on which they are captured; memory of one stream is not used on another
    pool: Any  # memory for what steps compute on their way
    first: torch.cuda.CUDAGraph  # of the graphs: PyTorch frees the pool for good with the last graph that uses it


@cache
def _shared() -> _Shared:
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
    return _Shared(stream, pool, _graph(torch.zeros(1, device="cuda").zero_, stream, pool))
