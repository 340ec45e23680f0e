"""The transport over MPI (mpi4py): non-blocking calls, and waits that leave the core to others."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import mpi4py
import numpy as np

# Before MPI starts: only one thread calls MPI (a higher level makes Open MPI's tcp layer deadlock when a peer dies),
# and a process that ends by an uncaught error must not wait in MPI_Finalize for ranks that never come: `close`
# finalizes, and a launcher stops the job when a rank leaves without.
mpi4py.rc.thread_level = "funneled"
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

from pflmpi.errors import TransportError  # noqa: E402
from pflmpi.transports.base import Transport, chunks, flush_output  # noqa: E402
from pflmpi.transports.waiting import SHORTEST, lost, wait  # noqa: E402

_TAG = 1


def world_size() -> int:
    """Return the number of ranks that MPI sees."""
    return int(MPI.COMM_WORLD.Get_size())


class MpiTransport(Transport):
    """All ranks of MPI's world.

    Every call begins with a meeting: a non-blocking barrier and pauses that grow, because some rank computes longer
    than the others. Only then does the payload move, at full speed: a payload that is asked for with long pauses
    moves one piece per pause.

    Args:
        timeout: seconds that a call waits for the other ranks.
    """

    name = "mpi"

    def __init__(self, timeout: float) -> None:
        super().__init__(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
        self._timeout = timeout
        self._comm = MPI.COMM_WORLD.Dup()  # messages of other libraries on the world do not mix with ours

    def abort(self, code: int) -> NoReturn:
        """Stop all ranks; the launcher ends with the exit code."""
        flush_output()
        self._comm.Abort(code)
        os._exit(code)

    def _broadcast(self, buffer: np.ndarray) -> None:
        with self._together("broadcast"):
            for chunk in chunks(buffer):
                self._move("broadcast", [self._comm.Ibcast([chunk, MPI.BYTE], root=0)])

    def _send(self, operation: str, parts: dict[int, np.ndarray]) -> None:
        self._exchange(operation, self._comm.Isend, parts)

    def _receive(self, operation: str, parts: dict[int, np.ndarray]) -> None:
        self._exchange(operation, self._comm.Irecv, parts)

    def _maximum(self, keys: np.ndarray) -> None:
        with self._together("maximum"):
            for chunk in chunks(keys):
                self._move("maximum", [self._comm.Iallreduce(MPI.IN_PLACE, [chunk, MPI.INT64_T], MPI.MAX)])

    def _sum(self, values: np.ndarray) -> None:
        with self._together("sum"):
            for chunk in chunks(values):
                buffer = [chunk, MPI.INT64_T]
                source, result = (MPI.IN_PLACE, buffer) if self.rank == 0 else (buffer, None)
                # Blocking, so without a time limit while payload moves: Open MPI 5's Ireduce is 3 to 6 times slower.
                self._comm.Reduce(source, result, MPI.SUM, root=0)

    def _barrier(self) -> None:
        with self._together("barrier"):
            pass

    def _close(self) -> None:
        self.barrier()  # MPI_Finalize waits for all ranks without a time limit and without a pause
        self._comm.Free()
        MPI.Finalize()

    def _exchange(self, operation: str, start: Callable[..., MPI.Request], parts: dict[int, np.ndarray]) -> None:
        """Send or receive parts by the rank at the other end; messages between two ranks arrive in order."""
        with self._together(operation):
            pairs = [(rank, chunk) for rank, part in parts.items() for chunk in chunks(part)]
            self._move(operation, [start([chunk, MPI.BYTE], rank, _TAG) for rank, chunk in pairs])

    @contextmanager
    def _together(self, operation: str) -> Iterator[None]:
        """Wait until all ranks are here; MPI's errors inside become ours."""
        try:
            wait(self._comm.Ibarrier().Test, self._timeout, operation)
            yield
        except MPI.Exception as error:
            raise TransportError(lost(operation, error)) from error

    def _move(self, operation: str, requests: list[MPI.Request]) -> None:
        wait(lambda: MPI.Request.Testall(requests), self._timeout, operation, longest=SHORTEST)
