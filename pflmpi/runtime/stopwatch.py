"""Seconds of the parts of a round."""

import time


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
