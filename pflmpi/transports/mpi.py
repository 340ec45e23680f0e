"""The transport over MPI (mpi4py): its start with a time limit, and waits that leave the core to others."""

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import mpi4py
import numpy as np

from pflmpi.errors import TransportError
from pflmpi.transports.base import SMALLEST_GPU_MESSAGE, Buffer, Transport, chunks, flush_output
from pflmpi.transports.mpi_library import loaded, open_library
from pflmpi.transports.peers import ended, names
from pflmpi.transports.waiting import SHORTEST_PAUSE, WaitTimeout, describe_loss, describe_timeout, wait

# Before mpi4py's module: it would start MPI when imported, without a limit, and hold Python's lock meanwhile, so that
# nobody could notice. Only one thread calls MPI (a higher level makes Open MPI's tcp layer deadlock when a peer dies),
# and a process that ends by an uncaught error must not wait in MPI_Finalize for ranks that never come: `close`
# finalizes, and a launcher stops the job when a rank leaves without.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

if TYPE_CHECKING:
    import torch

_MIN_TIMEOUT = 30.0  # seconds that a start may take whatever the limit: ranks load their libraries at different speeds
_TAG = 1
_ROLL_CALL = 2  # a tag of its own: payload does not mix with it
_ANSWER_SECONDS = 3.0  # seconds to answer a roll call; a waiting rank looks for one every few milliseconds
_FORWARD_SECONDS = 0.2  # seconds for the launcher to pass on what was shown: an abort now and then overtakes it


def start(timeout: float, late: Callable[[str], NoReturn]) -> None:
    """Start MPI if that has not been done.

    Args:
        timeout: seconds, of which there are 30 at least.
        late: called with an error text in another thread when it takes longer; ends this process.
    """
    if MPI.Is_initialized():
        return
    limit = max(timeout, _MIN_TIMEOUT)
    timer = threading.Timer(limit, lambda: late(describe_timeout("the start of MPI", limit, "")))
    timer.daemon = True
    timer.start()
    try:
        _init()
    finally:
        timer.cancel()
    for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py has them where it starts MPI


def _init() -> None:
    library = open_library()
    if library is None:
        MPI.Init_thread(MPI.THREAD_FUNNELED)
        return
    provided = ctypes.c_int()
    code = library.MPI_Init_thread(None, None, MPI.THREAD_FUNNELED, ctypes.byref(provided))  # without Python's lock
    if code != MPI.SUCCESS:
        raise RuntimeError(f"MPI_Init_thread ended with {code}")


def world_size() -> int:
    """Number of ranks that MPI sees, once it has been started."""
    return int(MPI.COMM_WORLD.Get_size())


class MpiTransport(Transport):
    """All ranks of MPI's world.

    Every call begins with a meeting: a non-blocking barrier polled with growing pauses, because some rank computes
    longer than the others. Only then does the payload move, at full speed: a payload polled with long pauses would
    move one piece per pause.

    Args:
        timeout: seconds that a call waits for the other ranks.
    """

    name = "mpi"

    def __init__(self, timeout: float) -> None:
        super().__init__(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), timeout)
        library = loaded()
        self.device_buffers = None if library is None else library.device_buffers
        self._between_gpus = False
        self._under_way: list[MPI.Request] = []  # they hold their buffers, which must outlive them
        self._comm = MPI.COMM_WORLD.Dup()  # other libraries' messages on the world do not mix with ours

    def use_gpus(self, ranks: Sequence[int], device: "torch.device") -> None:
        """Send from GPU to GPU, which the libraries of all ranks can; see the base class."""
        self._between_gpus = True

    def takes_gpu_memory(self, size: int, peer: int | None = None) -> bool:
        """Whether as many bytes are sent from GPU to GPU; see the base class."""
        return self._between_gpus and size >= SMALLEST_GPU_MESSAGE

    def abort(self, code: int) -> NoReturn:
        """Stop all ranks; the launcher ends with the exit code."""
        flush_output()
        time.sleep(_FORWARD_SECONDS)
        self._comm.Abort(code)
        os._exit(code)

    def _broadcast(self, buffer: Buffer) -> None:
        with self._together("broadcast"):
            wait_for_kernels(buffer)
            for chunk in chunks(buffer, self.max_message):
                if self.takes_gpu_memory(len(buffer)):
                    # Blocking: Open MPI takes no memory of GPUs in non-blocking collectives.
                    self._comm.Bcast([chunk, MPI.BYTE], root=0)
                else:
                    self._move([self._comm.Ibcast([chunk, MPI.BYTE], root=0)])

    def _exchange(self, sent: dict[int, Buffer], received: dict[int, Buffer]) -> None:
        with self._together("exchange"):
            for part in (*sent.values(), *received.values()):
                wait_for_kernels(part)
            self._move(
                [
                    start([chunk, MPI.BYTE], rank, _TAG)
                    for start, parts in ((self._comm.Isend, sent), (self._comm.Irecv, received))
                    for rank, part in parts.items()
                    for chunk in chunks(part, self.max_message)
                ]
            )

    def _barrier(self) -> None:
        with self._together("barrier"):
            pass

    def _close(self) -> None:
        self.barrier()  # MPI_Finalize waits for all ranks without a time limit and without a pause
        self._comm.Free()
        if self._goes_on:  # a process cannot start MPI again
            atexit.register(_finalize_at_exit)
        else:
            MPI.Finalize()

    @contextmanager
    def _together(self, operation: str) -> Iterator[None]:
        """Wait until all ranks are here; MPI's errors inside become ours."""
        try:
            meeting = self._comm.Ibarrier()
            self._under_way = [meeting]
            wait(lambda: meeting.Test() or is_roll_called(self._comm), self.timeout)
            if not meeting.Test():  # another rank's time is up
                raise WaitTimeout(self.timeout)
            yield
            self._under_way = []
        except MPI.Exception as error:
            raise TransportError(describe_loss(operation, error, ended(self.peers))) from error
        except WaitTimeout as late:
            who = names(call_roll(self._comm), self.peers)
            raise TransportError(describe_timeout(operation, late.seconds, who)) from late

    def _move(self, requests: list[MPI.Request]) -> None:
        self._under_way += requests
        wait(lambda: MPI.Request.Testall(requests), self.timeout, longest=SHORTEST_PAUSE)


def _finalize_at_exit() -> None:
    """End MPI once the process ends; where it ends by an error, end all ranks, which would wait for it."""
    flush_output()
    if hasattr(sys, "last_value"):
        MPI.COMM_WORLD.Abort(1)
    if not MPI.Is_finalized():
        MPI.Finalize()


def is_roll_called(comm: MPI.Intracomm) -> bool:
    """Whether another rank has called the roll."""
    return comm.Iprobe(tag=_ROLL_CALL)


def call_roll(comm: MPI.Intracomm) -> list[int]:
    """Ranks that do not answer a roll call: called when a rank's time is up, every waiting rank joins in."""
    rank, size = comm.Get_rank(), comm.Get_size()
    silent = set(range(size)) - {rank}
    requests = [comm.Isend(np.ones(1, np.uint8), other, _ROLL_CALL) for other in sorted(silent)]
    end = time.monotonic() + _ANSWER_SECONDS
    while silent and time.monotonic() < end:
        for other in sorted(silent):
            if comm.Iprobe(source=other, tag=_ROLL_CALL):
                comm.Recv(np.empty(1, np.uint8), other, _ROLL_CALL)
                silent.remove(other)
        time.sleep(0.01)
    del requests  # small messages need no completion; the ranks stop now
    return sorted(silent)


def wait_for_kernels(buffer: Buffer) -> None:
    """Wait for the kernels that use this memory: a library that is not CUDA's own keeps no order with them."""
    if not isinstance(buffer, np.ndarray) and buffer.is_cuda:
        import torch

        torch.cuda.current_stream(buffer.device).synchronize()
