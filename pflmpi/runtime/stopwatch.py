"""Seconds of the parts of a round, and of one call."""

import time
from collections.abc import Callable

import torch


class Stopwatch:
    """Runs from the moment it is made."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, or since it was made."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._began


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, to its end; on a CPU those that this thread computes, whatever else runs there."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    began = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began
