"""Which ranks have come to a call of torch.distributed: each rank's newest call is noted where all can read it."""

import threading
from datetime import timedelta

from torch._C._distributed_c10d import Store  # torch.distributed does not declare it

_EVERY = 1.0  # seconds between two notes; the shortest time limit that can name ranks is a little longer
_ANSWER = timedelta(seconds=3)


class Arrivals:
    """Notes of how far each rank is. All ranks make the same calls, so one that has noted a lower number has not come.

    The group's own calls cannot say it: each rank waits for a neighbour, who may be waiting as well.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store.clone()  # the thread below must not share the main thread's connection
        self._store.set_timeout(_ANSWER)
        self._rank = rank
        self._size = size
        self._number = 0
        self._closed = threading.Event()
        threading.Thread(target=self._note, name="pflmpi-arrivals", daemon=True).start()

    def enter(self) -> None:
        """Count a call."""
        self._number += 1

    def absent(self) -> list[int]:
        """Return the ranks that have not come to this rank's newest call."""
        try:
            return [rank for rank in range(self._size) if rank != self._rank and self._noted(rank) < self._number]
        except RuntimeError:  # the store lives in rank 0, unless torchrun has it
            return [0]

    def close(self) -> None:
        """End the notes."""
        self._closed.set()

    def _noted(self, rank: int) -> int:
        name = _name(rank)
        return int(self._store.get(name)) if self._store.check([name]) else 0

    def _note(self) -> None:
        noted = 0
        while not self._closed.wait(_EVERY):
            number = self._number
            if number > noted:
                try:
                    self._store.set(_name(self._rank), str(number))
                except RuntimeError:  # rank 0 has gone; the call itself will say so
                    return
                noted = number


def _name(rank: int) -> str:
    return f"call/{rank}"
