"""Where each rank runs and what it sees there: to name the one that is missing, and to agree who computes where."""

import json
import os
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pflmpi import machine
from pflmpi.machine import Gpu, has_ended

_MAX_NAMED = 8  # ranks named in an error


@dataclass(frozen=True)
class Peer:
    """Where a rank runs.

    Attributes:
        cores: numbers of the cores that it may use.
        gpus: that it sees and may use, in the order of its numbers for them.
        device_buffers: whether its MPI library moves memory of a GPU; None where there is none, or it does not say.
        requested: the variable by which it was given GPUs, from `machine.requested_gpus`; "" for none.
        system: boot and process namespace, within which the process id means something; see `machine.system`.
    """

    host: str
    process: int
    cores: tuple[int, ...] = (0,)
    gpus: tuple[Gpu, ...] = ()
    device_buffers: bool | None = None
    requested: str = ""
    system: str = field(default_factory=machine.system)

    @classmethod
    def here(cls, cores: Sequence[int], gpus: Sequence[Gpu], requested: str) -> "Peer":
        return cls(socket.gethostname(), os.getpid(), tuple(cores), tuple(gpus), requested=requested)

    @classmethod
    def from_json(cls, text: str) -> "Peer":
        host, process, cores, gpus, *rest = json.loads(text)
        return cls(host, process, tuple(cores), tuple(Gpu(*gpu) for gpu in gpus), *rest)

    def to_json(self) -> str:
        return json.dumps([*vars(self).values()])

    def ended(self) -> bool:
        """Whether the process has ended; one on another host, or in another namespace, counts as alive."""
        here = self.host == socket.gethostname() and self.system == machine.system()
        return here and has_ended(self.process)


def ended(peers: Sequence[Peer], patience: float = 0.0) -> str:
    """The ranks on this host whose processes have ended, for an error; "" if there are none.

    Args:
        patience: seconds to keep looking; a killed process closes its connections before it has ended.
    """
    end = time.monotonic() + patience
    while True:
        ranks = [rank for rank, peer in enumerate(peers) if peer.ended()]
        if ranks or time.monotonic() >= end:
            return names(ranks, peers)
        time.sleep(0.02)


def check_alive(peers: Sequence[Peer]) -> None:
    """Raise `RuntimeError`, as torch does for a lost connection, if a rank on this host has ended: NCCL waits on."""
    if lost_ranks := ended(peers):
        raise RuntimeError(f"{lost_ranks} has ended")


def names(ranks: Collection[int], peers: Sequence[Peer]) -> str:
    """Ranks with their hosts, for an error.

    >>> names([1, 2], [Peer("a", 7), Peer("a", 8), Peer("b", 9)])
    'rank 1 (host a, process 8) and rank 2 (host b, process 9)'
    >>> names([3], [])
    'rank 3'
    """
    words = [f"rank {r} (host {peers[r].host}, process {peers[r].process})" if peers else f"rank {r}" for r in ranks]
    if len(words) > _MAX_NAMED:
        words[_MAX_NAMED:] = [f"{len(words) - _MAX_NAMED} more"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
