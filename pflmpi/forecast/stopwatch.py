"""How long a call takes, and how much memory it needs beyond what is there before."""

import contextlib
import ctypes
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_REPEATS = 3
_LONG = 1.0  # seconds; a longer call is made once


@dataclass(frozen=True)
class Taken:
    """What a call has taken.

    Attributes:
        seconds: the median of a few calls, after one that warms up.
        memory: bytes of the host.
        device: bytes of the GPU; 0 on a CPU.
    """

    seconds: float
    memory: float
    device: float


def measure(call: Callable[[], object], device: torch.device) -> Taken:
    """Call a few times and return what a call takes."""
    host, on_gpu = _settle(device)
    first = _timed(call, device)
    times = [_timed(call, device) for _ in range(_REPEATS if first < _LONG else 0)]
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return Taken(statistics.median(times or [first]), max(_status("VmHWM") - host, 0), peak - on_gpu)


def resident() -> int:
    """Return the bytes of memory that this process has; where the system does not say, the most it ever had."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
    return _status("VmRSS") or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def shared() -> int:
    """Return the bytes of it that are of files, which processes of a node share; 0 where the system does not say."""
    return _status("RssFile")


def _settle(device: torch.device) -> tuple[int, int]:
    """Forget the peaks, and return the bytes that the host and the GPU have in use."""
    host = resident()
    with contextlib.suppress(OSError):  # the peak is then that of the whole process, which is more
        Path("/proc/self/clear_refs").write_text("5")
    if device.type != "cuda":
        return host, 0
    _wait(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return host, torch.cuda.memory_reserved(device)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    # On a CPU the seconds that this thread computes: what others do on a login node at the same time is left out.
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    began = clock()
    call()
    _wait(device)
    return clock() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return 0
