"""Memory of this process, and what a call in it costs."""

import contextlib
import ctypes
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pflmpi.machine import own_memory

_REPEATS = 3
_LONG = 2.0  # seconds; a longer call is made once


@dataclass(frozen=True)
class Cost:
    """Cost of a call.

    Attributes:
        seconds: median of a few calls, after one that warms up.
        memory: bytes of the host, besides those in use before.
        device: likewise bytes of the GPU; 0 on a CPU.
    """

    seconds: float
    memory: float
    device: float


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of a process that has loaded the data and computed nothing.

    Attributes:
        resident: all that it has.
        program: without the data.
        data: samples and who holds which.
        shared: of both, what processes of a node have in common.
    """

    resident: int
    program: int
    data: int
    shared: int


def measure(call: Callable[[], object], device: torch.device) -> Cost:
    """Cost of a call, made a few times."""
    host, on_gpu = _reset_peaks(device)
    first = _seconds_of(call, device)
    times = [_seconds_of(call, device) for _ in range(_REPEATS if first < _LONG else 0)]
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return Cost(statistics.median(times or [first]), max(own_memory("VmHWM") - host, 0), peak - on_gpu)


def resident() -> int:
    """Bytes of memory that this process has; where the system does not say, the most it ever had."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # free memory goes back to the system
    return own_memory("VmRSS") or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_files() -> int:
    """Bytes of it that belong to files, which processes of a node share; 0 where the system does not say."""
    return own_memory("RssFile")


def _reset_peaks(device: torch.device) -> tuple[int, int]:
    """Forget the peaks; bytes that the host and the GPU have in use."""
    host = resident()
    with contextlib.suppress(OSError):  # the peak is then that of the whole process, which is more
        Path("/proc/self/clear_refs").write_text("5")
    if device.type != "cuda":
        return host, 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return host, torch.cuda.memory_reserved(device)


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, to its end; on a CPU those that this thread computes, whatever else runs there."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    began = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began
