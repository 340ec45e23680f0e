"""Counts the bytes that ranks send each other in one call of a transport."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Traffic:
    """The bytes of one broadcast or exchange.

    Attributes:
        sent, received: [R] bytes that each rank sends to others in an exchange, and that it receives from others.
        down: whether they are part of the downlink, not of the uplink.
    """

    sent: np.ndarray
    received: np.ndarray
    down: bool

    @property
    def moved(self) -> int:
        """Bytes that ranks receive from others."""
        return int(self.received.sum())

    @classmethod
    def broadcast(cls, size: int, ranks: int) -> "Traffic":
        """Traffic of a broadcast of `size` bytes from rank 0."""
        return cls(np.zeros(ranks, np.int64), np.array([0, *[size] * (ranks - 1)]), down=True)

    @classmethod
    def gather(cls, sizes: list[int]) -> "Traffic":
        """Traffic of a gather on rank 0, with `sizes` [R] bytes from each rank."""
        sent = np.array([0, *sizes[1:]])
        return cls(sent, np.array([sent.sum(), *[0] * (len(sizes) - 1)]), down=False)


def wire_bytes(calls: list[Traffic]) -> tuple[int, int]:
    """Returns the bytes between ranks, of the uplink and of the downlink."""
    up = sum(call.moved for call in calls if not call.down)
    return up, sum(call.moved for call in calls if call.down)
