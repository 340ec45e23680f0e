"""The bytes that ranks send each other in one call of a transport."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Traffic:
    """The bytes of one broadcast or exchange.

    Attributes:
        sent, received: [R] bytes that each rank sends to others in an exchange, and that it receives from others.
        down: whether it is on the way to clients, not from them.
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
        """So many bytes from rank 0 to all ranks."""
        return cls(np.zeros(ranks, np.int64), np.array([0, *[size] * (ranks - 1)]), down=True)

    @classmethod
    def gather(cls, sizes: list[int]) -> "Traffic":
        """So many bytes [R] from each rank to rank 0."""
        sent = np.array([0, *sizes[1:]])
        return cls(sent, np.array([sent.sum(), *[0] * (len(sizes) - 1)]), down=False)


def wire_bytes(calls: list[Traffic]) -> tuple[int, int]:
    """Bytes between ranks: on the way from clients, and to them."""
    up = sum(call.moved for call in calls if not call.down)
    return up, sum(call.moved for call in calls if call.down)
