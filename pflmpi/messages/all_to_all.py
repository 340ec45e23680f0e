"""The bytes of an all-to-all between any number of ranks, without a table of all pairs."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pflmpi.messages.calls import Call


@dataclass(frozen=True)
class AllToAll:
    """What every rank sends to every rank: a sum of products of a number of the sender and one of the receiver.

    Attributes:
        factors: of each product, [R] by sender and [R] by receiver; int64.

    >>> rows = AllToAll(((np.array([2, 0, 1]), np.array([10, 20, 0])),))
    >>> rows.sent_by(0), rows.received_by(1), rows.sent.tolist(), rows.moved
    ({0: 20, 1: 40}, {0: 40, 2: 20}, [40, 0, 30], 70)
    """

    factors: tuple[tuple[np.ndarray, np.ndarray], ...]

    def sent_by(self, rank: int) -> dict[int, int]:
        """Bytes that a rank has for each, itself among them; those for whom it has something, ascending."""
        return _there(sum(senders[rank] * receivers for senders, receivers in self.factors))

    def received_by(self, rank: int) -> dict[int, int]:
        """Bytes that each rank has for a rank, itself among them; those that have something, ascending."""
        return _there(sum(senders * receivers[rank] for senders, receivers in self.factors))

    @cached_property
    def sent(self) -> np.ndarray:
        """[R] bytes that each rank sends to others."""
        found: np.ndarray = sum(senders * (receivers.sum() - receivers) for senders, receivers in self.factors)
        return found

    @cached_property
    def received(self) -> np.ndarray:
        """[R] bytes that each rank receives from others."""
        found: np.ndarray = sum(receivers * (senders.sum() - senders) for senders, receivers in self.factors)
        return found

    @property
    def moved(self) -> int:
        """Bytes that all ranks send to others."""
        return int(self.sent.sum())

    def call(self, answers: bool = False) -> Call:
        """The collective call; `answers`: on the way to clients, not from them."""
        return Call("all-to-all", tuple(self.sent.tolist()), tuple(self.received.tolist()), answers)


def _there(sizes: np.ndarray) -> dict[int, int]:
    ranks = np.flatnonzero(sizes)
    return dict(zip(ranks.tolist(), sizes[ranks].tolist(), strict=True))
