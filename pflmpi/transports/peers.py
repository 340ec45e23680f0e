"""Who the ranks are: host and process of each, so that an error can name the one that is missing."""

import os
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_ENDED = ("Z", "X")  # states of a process that has ended and that nobody has asked about yet


@dataclass(frozen=True)
class Peer:
    """Where a rank runs.

    Attributes:
        host: name of the node.
        process: its number there.
        device: "cpu" or "cuda".
        slots: how many ranks can compute at once on the node.
    """

    host: str
    process: int
    device: str = "cpu"
    slots: int = 1

    @classmethod
    def here(cls, device: str, slots: int) -> "Peer":
        """Return this process."""
        return cls(socket.gethostname(), os.getpid(), device, slots)

    @classmethod
    def read(cls, text: bytes) -> "Peer":
        """Return the peer that `text` describes."""
        host, process, device, slots = text.rstrip(b"\0").decode(errors="replace").rsplit(":", 3)
        return cls(host, int(process), device, int(slots))

    def text(self, size: int) -> bytes:
        """Return this peer as bytes of a fixed size; a host's name longer than that is cut."""
        rest = f":{self.process}:{self.device}:{self.slots}".encode()
        return (self.host.encode()[: size - len(rest)] + rest).ljust(size, b"\0")

    def ended(self) -> bool:
        """Return whether the process has ended; one of another host counts as alive."""
        if self.host != socket.gethostname():
            return False
        try:
            status = Path(f"/proc/{self.process}/stat").read_text()
        except FileNotFoundError:
            return Path("/proc/self/stat").exists()  # not where a system has no such files
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in _ENDED


def all_slots(peers: Sequence[Peer]) -> int:
    """Return how many ranks of a run can compute at once.

    >>> all_slots([Peer("a", 7, slots=4), Peer("a", 8, slots=4), Peer("b", 9, slots=2)])
    6
    """
    return sum({peer.host: peer.slots for peer in peers}.values())


def names(ranks: Collection[int], peers: Sequence[Peer]) -> str:
    """Return ranks with their hosts for an error.

    >>> names([1, 2], [Peer("a", 7), Peer("a", 8), Peer("b", 9)])
    'rank 1 (host a, process 8) and rank 2 (host b, process 9)'
    >>> names([3], [])
    'rank 3'
    """
    known = [f"rank {r} (host {peers[r].host}, process {peers[r].process})" if peers else f"rank {r}" for r in ranks]
    if len(known) > _SHOWN:
        known[_SHOWN:] = [f"{len(known) - _SHOWN} more"]
    return " and ".join([", ".join(known[:-1]), known[-1]] if len(known) > 1 else known)


_SHOWN = 8
