"""What captures the launches of a step, by kind of device: CUDA graphs."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

Work = Callable[[], object]
Capture = Callable[[Work], Work]  # notes what the work launches, without running it; the result launches that again

_log = logging.getLogger(__name__)


def cuda_graph(work: Work) -> Work:
    """What some work launches on the current GPU, as one launch."""
    shared = _shared()
    return _graph(work, shared.stream, shared.pool).replay


def _graph(work: Work, stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        # What other threads call meanwhile is no part of it, such as NCCL's, which looks for ranks that are lost.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    here.wait_stream(stream)
    return graph


BY_DEVICE: dict[str, Capture] = {"cuda": cuda_graph}


def capture_on(device: torch.device) -> Capture | None:
    """What captures steps on a device; None if nothing does."""
    return BY_DEVICE.get(device.type)


@cache  # one line for each reason in a process
def say_why_not(reason: str) -> None:
    """Say in the log, once, why a step is not captured."""
    _log.warning("a training step is not captured in a CUDA graph, but launched operation by operation: %s", reason)


class _Shared(NamedTuple):
    """What all graphs of this process share, since they run one after another.

    Attributes:
        stream: on which they are captured; memory of one stream is not used on another.
        pool: memory for what steps compute on their way.
        first: of the graphs: PyTorch frees the pool for good with the last graph that uses it.
    """

    stream: torch.cuda.Stream
    pool: Any
    first: torch.cuda.CUDAGraph


@cache
def _shared() -> _Shared:
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
    return _Shared(stream, pool, _graph(torch.zeros(1, device="cuda").zero_, stream, pool))
