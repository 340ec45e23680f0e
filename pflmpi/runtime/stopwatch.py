"""Seconds of the parts of a round."""

import time


class Stopwatch:
    """Runs from its making; `lap` ends a part and names it.

    Attributes:
        laps: seconds by name.
    """

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End the part that began with the lap before."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began
