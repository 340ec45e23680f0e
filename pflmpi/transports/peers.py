"""Host, process and hardware of each rank, to name missing ranks and to place ranks on GPUs."""

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
    """Where a rank runs and what it sees.

    Attributes:
        cores: numbers of the cores that it may use.
        gpus: the GPUs that it may use, in the order of their CUDA device numbers.
        device_buffers: whether its MPI library can send GPU memory; None without MPI, or if it does not say.
        requested: the variable by which GPUs were allocated to it, from `machine.requested_gpus`; "" for none.
        system: boot and process namespace, within which the process id is valid; see `machine.identify_system`.
    """

    host: str
    process: int
    cores: tuple[int, ...] = (0,)
    gpus: tuple[Gpu, ...] = ()
    device_buffers: bool | None = None
    requested: str = ""
    system: str = field(default_factory=machine.identify_system)

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
        is_local = self.host == socket.gethostname() and self.system == machine.identify_system()
        return is_local and has_ended(self.process)


def describe_ended(peers: Sequence[Peer], patience: float = 0.0) -> str:
    """Names the ranks on this host whose processes have ended; "" if there are none.

    Args:
        patience: seconds to wait for one, because a killed process closes its connections before it ends.
    """
    end = time.monotonic() + patience
    while True:
        ranks = [rank for rank, peer in enumerate(peers) if peer.ended()]
        if ranks or time.monotonic() >= end:
            return describe_ranks(ranks, peers)
        time.sleep(0.02)


def check_alive(peers: Sequence[Peer]) -> None:
    """Raise `RuntimeError` if a rank on this host has ended, as torch does for a lost connection; NCCL does not."""
    if lost_ranks := describe_ended(peers):
        raise RuntimeError(f"{lost_ranks} has ended")


def describe_ranks(ranks: Collection[int], peers: Sequence[Peer]) -> str:
    """Formats ranks with their hosts and processes.

    >>> describe_ranks([1, 2], [Peer("a", 7), Peer("a", 8), Peer("b", 9)])
    'rank 1 (host a, process 8) and rank 2 (host b, process 9)'
    >>> describe_ranks([3], [])
    'rank 3'
    """
    words = [f"rank {r} (host {peers[r].host}, process {peers[r].process})" if peers else f"rank {r}" for r in ranks]
    if len(words) > _MAX_NAMED:
        words[_MAX_NAMED:] = [f"{len(words) - _MAX_NAMED} more"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
