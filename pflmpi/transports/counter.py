"""Counting the payload bytes that a run moves between ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Channel = Literal["data", "control", "checkpoint"]


class Counter:
    """Payload bytes per channel: `down` moved between ranks on the way to clients, `up` on the way from them.

    Every rank counts what the whole group moved, as far as it knows the sizes; rank 0 knows all of them.

    >>> counter = Counter()
    >>> with counter.channel("data"):
    ...     counter.add(down=10)
    >>> counter.take("data"), counter.take("data"), counter.take("control")
    ((10, 0), (0, 0), (0, 0))
    """

    def __init__(self) -> None:
        self._down: dict[Channel, int] = dict.fromkeys(get_args(Channel), 0)
        self._up: dict[Channel, int] = dict.fromkeys(get_args(Channel), 0)
        self._channel: Channel = "control"

    @contextmanager
    def channel(self, name: Channel) -> Iterator[None]:
        """Count on the named channel inside the context; outside of any, on `control`."""
        assert name in self._down, f"channel {name!r}; known: {', '.join(self._down)}"
        before, self._channel = self._channel, name
        try:
            yield
        finally:
            self._channel = before

    def add(self, down: int = 0, up: int = 0) -> None:
        """Count bytes on the current channel."""
        self._down[self._channel] += down
        self._up[self._channel] += up

    def take(self, channel: Channel) -> tuple[int, int]:
        """Bytes (down, up) of a channel since the last call; resets them to zero."""
        taken = self._down[channel], self._up[channel]
        self._down[channel] = self._up[channel] = 0
        return taken
