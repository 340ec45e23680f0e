"""What ranks exchange through torch's key-value store: how far each has come."""

import os
import threading
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed does not declare them

from pflmpi.transports.detect import Launch

_INTERVAL = 1.0  # seconds between two notes; the shortest time limit that can name ranks is a little longer
_ANSWER = timedelta(seconds=3)


def connect(launch: Launch, timeout: float) -> Store:
    """The store in which the ranks of this start meet, connected within `timeout` seconds.

    Under torchrun the store outlives a restart, and with it the addresses of dead processes; so each start uses its
    own prefix. (torch's own rendezvous does not separate them and fails after a restart, up to 2.15 at least.)
    """
    host, _, port = (launch.address or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}").rpartition(":")
    hosted = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(host, int(port), is_master=hosted, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    return PrefixStore(f"pflmpi/{launch.restarts}", store)


class Arrivals:
    """Notes in the store of how many calls each rank has entered, to name the ranks that are late.

    All ranks make the same calls, so one that has noted a lower number has not arrived. The group's own calls cannot
    tell: each rank waits for a neighbour, which may itself be waiting.
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
        """The ranks that have not entered this rank's newest call."""
        try:
            return [rank for rank in range(self._size) if rank != self._rank and self._noted(rank) < self._number]
        except RuntimeError:  # the store lives in rank 0, unless torchrun hosts it
            return [0]

    def close(self) -> None:
        """Stop taking notes."""
        self._closed.set()

    def _noted(self, rank: int) -> int:
        return int(self._store.get(f"call/{rank}")) if self._store.check([f"call/{rank}"]) else 0

    def _note(self) -> None:
        noted = 0
        while not self._closed.wait(_INTERVAL):
            number = self._number
            if number > noted:
                try:
                    self._store.set(f"call/{self._rank}", str(number))
                except RuntimeError:  # rank 0 is gone; the call itself will report it
                    return
                noted = number
