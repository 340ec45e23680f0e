"""Where each rank runs, host and process, so that an error can name the one that is missing."""

import os
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PACKED_BYTES = 96  # of a peer on its way to the other ranks

_ENDED = ("Z", "X")  # states of a process that has ended and has not been reaped
_SHOWN = 8  # ranks named in an error


@dataclass(frozen=True)
class Peer:
    """Where a rank runs.

    Attributes:
        host: name of the node.
        process: process id there.
        device: "cpu" or "cuda".
        slots: number of ranks that can compute at once on the node.
    """

    host: str
    process: int
    device: str = "cpu"
    slots: int = 1

    @classmethod
    def here(cls, device: str, slots: int) -> "Peer":
        """This process."""
        return cls(socket.gethostname(), os.getpid(), device, slots)

    @classmethod
    def unpacked(cls, buffer: np.ndarray) -> "Peer":
        """The peer packed in a buffer; the inverse of `packed`."""
        host, process, device, slots = buffer.tobytes().rstrip(b"\0").decode(errors="replace").rsplit(":", 3)
        return cls(host, int(process), device, int(slots))

    def packed(self) -> np.ndarray:
        """This peer as uint8 [96]; a host name that does not fit is cut."""
        rest = f":{self.process}:{self.device}:{self.slots}".encode()
        text = (self.host.encode()[: PACKED_BYTES - len(rest)] + rest).ljust(PACKED_BYTES, b"\0")
        return np.frombuffer(text, np.uint8).copy()

    def ended(self) -> bool:
        """Whether the process has ended; one on another host counts as alive."""
        if self.host != socket.gethostname():
            return False
        try:
            status = Path(f"/proc/{self.process}/stat").read_text()
        except FileNotFoundError:
            return Path("/proc/self/stat").exists()  # unknown on a system without /proc
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in _ENDED


def ended(peers: Sequence[Peer], patience: float = 0.0) -> str:
    """The ranks on this host whose processes have ended, for an error; "" if there are none.

    Args:
        patience: seconds to keep looking; a killed process closes its connections before it has ended.
    """
    end = time.monotonic() + patience
    while True:
        found = [rank for rank, peer in enumerate(peers) if peer.ended()]
        if found or time.monotonic() >= end:
            return names(found, peers)
        time.sleep(0.02)


def all_slots(peers: Sequence[Peer]) -> int:
    """Number of ranks of a run that can compute at once.

    >>> all_slots([Peer("a", 7, slots=4), Peer("a", 8, slots=4), Peer("b", 9, slots=2)])
    6
    """
    return sum({peer.host: peer.slots for peer in peers}.values())


def names(ranks: Collection[int], peers: Sequence[Peer]) -> str:
    """Ranks with their hosts, for an error.

    >>> names([1, 2], [Peer("a", 7), Peer("a", 8), Peer("b", 9)])
    'rank 1 (host a, process 8) and rank 2 (host b, process 9)'
    >>> names([3], [])
    'rank 3'
    """
    known = [f"rank {r} (host {peers[r].host}, process {peers[r].process})" if peers else f"rank {r}" for r in ranks]
    if len(known) > _SHOWN:
        known[_SHOWN:] = [f"{len(known) - _SHOWN} more"]
    return " and ".join([", ".join(known[:-1]), known[-1]] if len(known) > 1 else known)
