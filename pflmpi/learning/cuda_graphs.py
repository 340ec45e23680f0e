"""Training steps captured in CUDA graphs, on static buffers: one launch per step.

A captured step reads and writes fixed memory. So the state of a pass is copied into buffers before its first captured
step and back at its end, and each batch is copied before its step. Buffers and captures are kept for later passes.

Captures are verified: the first captured step is also taken without the graph. If one bit differs, or the capture
fails, this is logged once and steps are launched operation by operation.
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
Capture = Callable[[Work], Work]  # captures what the work launches, without running it; the result launches it

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an entry
_log = logging.getLogger(__name__)


def cuda_graph(work: Work) -> Work:
    """CUDA graph of the work on the current GPU: one launch."""
    resources = _graph_resources()
    return _capture(work, resources.stream, resources.pool).replay


def _capture(work: Work, stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # Calls of other threads do not invalidate it, such as those of NCCL's watchdog.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the first error has the reason
                _end_capture(graph, pool)
            raise
        _end_capture(graph, pool)
    current.wait_stream(stream)
    return graph


def _end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Ends a capture; if it has failed, ends its allocations too, which PyTorch (2.14) does not.

    While a capture is active, memory that several streams have used is not freed.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # they had ended
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise


BY_DEVICE: dict[str, Capture] = {"cuda": cuda_graph}


def capture_on(device: torch.device) -> Capture | None:
    """Capture of training steps on a type of device; None if it has none."""
    return BY_DEVICE.get(device.type)


@cache  # one line for each reason in a process
def warn_not_captured(reason: str) -> None:
    """Logs once why a step is not captured."""
    _log.warning("a training step is not captured in a CUDA graph, but launched operation by operation: %s", reason)


class StaticBuffers:
    """Memory for the state of one kind of training, and the steps captured on it."""

    def __init__(self) -> None:
        self._state: list[Tensor] = []
        self._changed: Sequence[Tensor] = ()  # tensors of the current pass that `put_back` updates
        self._captured: dict[Program, tuple[list[Tensor], Work] | None] = {}

    def run(
        self,
        program: Program,
        batch: Sequence[Tensor],
        state: Sequence[Tensor],
        num_changed: int,
        capture: Capture,
    ) -> bool:
        """Takes a step of a pass; returns False if steps of this program are not captured.

        Args:
            state: of the pass; `put_back` updates it.
            num_changed: how many of these tensors, from the first on, a step may change.
        """
        if program not in self._captured:
            self.put_back()
            self._captured[program] = self._capture_step(program, batch, state, num_changed, capture)
            return True
        captured = self._captured[program]
        if captured is None:
            self.put_back()
            return False
        self._load(state, num_changed)
        buffers, launch = captured
        _copy(buffers, batch)
        launch()
        return True

    def put_back(self) -> None:
        """Copies the changed state from the buffers to the tensors of the current pass."""
        _copy(self._changed, self._state[: len(self._changed)])
        self._changed = ()

    def abandon(self) -> None:
        """Drops the current pass without updating its state."""
        self._changed = ()

    def _load(self, state: Sequence[Tensor], num_changed: int) -> None:
        """Copies the state of a new pass into the buffers."""
        if not self._changed:
            if not self._state:
                buffers = {id(tensor): _empty_like(tensor, int(tensor.storage_offset())) for tensor in state}
                self._state = [buffers[id(tensor)] for tensor in state]  # two phases may share the sum of losses
            _copy(self._state, state)
            self._changed = state[:num_changed]

    def _capture_step(
        self, program: Program, batch: Sequence[Tensor], state: Sequence[Tensor], num_changed: int, capture: Capture
    ) -> tuple[list[Tensor], Work] | None:
        """Takes a step with and without capture; returns the capture, with the state loaded, if the bits agree."""
        captured, reason = None, ""
        if any(tensor.device != batch[0].device for tensor in (*batch, *state)):
            reason = "it reads a tensor of the host, whose value would be fixed"
        else:
            try:
                buffers = [_empty_like(tensor, 0) for tensor in batch]
                self._load(state, num_changed)
                captured = buffers, capture(lambda: program.run(*buffers, *program.bind(*self._state)))
                _copy(buffers, batch)
                captured[1]()
            except RuntimeError as error:  # also if memory is exhausted
                captured, reason = None, str(error).splitlines()[0]
        program.run(*batch, *program.bind(*state))
        if captured is not None and not _have_same_bits(self._state[:num_changed], state[:num_changed]):
            captured, reason = None, "the captured step has other bits"
        if captured is None:
            self.abandon()
        if reason:
            warn_not_captured(reason)
        return captured


def _empty_like(tensor: Tensor, offset: int) -> Tensor:
    """New memory with the layout of a tensor, and with the alignment of one at that storage offset."""
    span = 0
    if tensor.numel():
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset %= ALIGNED // tensor.element_size()
    memory = torch.empty(offset + span, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors of equal layouts, with one call per type."""
    targets, sources = [*map(_unexpand, targets)], [*map(_unexpand, sources)]
    for dtype in dict.fromkeys(tensor.dtype for tensor in targets):
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _unexpand(tensor: Tensor) -> Tensor:
    """The tensor with expanded axes reduced to the one entry that is in memory."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor
    shape = [size if stride else min(size, 1) for size, stride in zip(tensor.shape, strides, strict=True)]
    return tensor.as_strided(shape, strides)


def _have_same_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether tensors have the same bits; waits for the device."""
    pairs = [[tensor.view(_BITS[tensor.element_size()]) for tensor in pair] for pair in zip(first, second, strict=True)]
    return bool(torch.stack([(a == b).all() for a, b in pairs]).all())


class _GraphResources(NamedTuple):
    """Stream and memory shared by all graphs of this process, which run one after another."""

    stream: torch.cuda.Stream  # for all captures: memory of one stream is not used on another
    pool: Any  # memory for intermediate results
    first: torch.cuda.CUDAGraph  # keeps the pool: PyTorch frees it for good with the last graph that uses it


@cache
def _graph_resources() -> _GraphResources:
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
    return _GraphResources(stream, pool, _capture(torch.zeros(1, device="cuda").zero_, stream, pool))
