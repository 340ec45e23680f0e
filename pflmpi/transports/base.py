"""The contract of every transport: collective calls over ranks, and how a group of ranks begins and ends."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NoReturn

from pflmpi.transports.collectives import Collectives
from pflmpi.transports.peers import Peer

if TYPE_CHECKING:
    import torch


class Transport(Collectives):
    """Ranks that make collective calls together.

    A lost rank, and a rank that does not answer within the time limit, raise `TransportError`.
    After that only `abort` may be called.

    Attributes:
        name: of the transport.
        timeout: seconds that a call waits for the other ranks; may be changed between calls, equally on all ranks.
        peers: host and process of each rank; empty before `introduce`.
        device_buffers: whether the library of this rank moves memory of a GPU; None where it does not say.
    """

    name: ClassVar[str]
    device_buffers: bool | None = None

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        self.timeout = timeout
        self.peers: list[Peer] = []
        self._closed = False

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            self._barrier()

    def use_gpus(self, ranks: Sequence[int], device: "torch.device") -> None:
        """Move large messages between GPUs; every rank calls this once, with what `gpu_messages` decided.

        Args:
            ranks: those that do: all, or all but rank 0.
            device: of this rank.
        """

    def close(self, goes_on: bool = False) -> None:
        """Disconnect, together with all other ranks, once; `goes_on`: this process may connect again."""
        self._goes_on = goes_on
        if not self._closed:
            self._closed = True
            self._close()

    @abstractmethod
    def abort(self, code: int) -> NoReturn:
        """Stop all ranks at once; this process ends with the exit code."""

    @abstractmethod
    def _barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def _close(self) -> None:
        """Release what the transport holds; called once."""
