"""Seconds of the parts of a round, and of one call."""

import time
from collections import defaultdict
from collections.abc import Callable

import torch


class Stopwatch:
    """Seconds of the parts of a round, from the moment it is made.

    Attributes:
        laps: seconds of each part; a part may be measured in several pieces.
    """

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.laps: defaultdict[str, float] = defaultdict(float)

    def lap(self, part: str) -> None:
        """Add the seconds since the last lap to a part."""
        before, self._last = self._last, time.perf_counter()
        self.laps[part] += self._last - before

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
