"""The transport over MPI (mpi4py), with time limits for its start and its calls, and waits that yield the core."""

import atexit
import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import mpi4py
import numpy as np

from pflmpi.errors import TransportError
from pflmpi.transports.base import SMALLEST_GPU_MESSAGE, Buffer, Transport, chunks, flush_output
from pflmpi.transports.peers import describe_ended, describe_ranks
from pflmpi.transports.waiting import SHORTEST_PAUSE, WaitTimeout, describe_loss, describe_timeout, wait

# Set before importing MPI, because the import would start it without a time limit while holding the GIL, so that no
# other thread could notice. Only one thread calls MPI (a higher thread level makes Open MPI's tcp layer deadlock when a
# peer dies). A process that ends by an uncaught error must not wait in MPI_Finalize for ranks that never come: `close`
# finalizes, and launchers stop the job when a rank exits without it.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

if TYPE_CHECKING:
    import torch

_MIN_TIMEOUT = 30.0  # seconds for the start at least, because ranks load their libraries at different speeds
_TAG, _ROLL_CALL_TAG = 1, 2
_LIBRARY = re.compile(r"/libmpi(ch)?(_\w+)?\.so[\d.]*$")
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h
_ANSWER_SECONDS = 3.0  # for a roll call; waiting ranks check for one every few milliseconds
_FORWARD_SECONDS = 0.2  # for the launcher to forward the output, which an abort may overtake


def start(timeout: float, late: Callable[[str], NoReturn]) -> None:
    """Start MPI unless it is running.

    Args:
        timeout: seconds, at least 30.
        late: called with an error text in another thread if the start takes longer; ends this process.
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
        communicator.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does when it starts MPI


def _init() -> None:
    library = open_library()
    if library is None:
        MPI.Init_thread(MPI.THREAD_FUNNELED)
        return
    provided = ctypes.c_int()
    code = library.MPI_Init_thread(None, None, MPI.THREAD_FUNNELED, ctypes.byref(provided))  # without the GIL
    if code != MPI.SUCCESS:
        raise RuntimeError(f"MPI_Init_thread ended with {code}")


def world_size() -> int:
    """Number of ranks that MPI sees, once it has been started."""
    return int(MPI.COMM_WORLD.Get_size())


def library_name() -> str:
    """Name and version of the MPI library, such as "Open MPI 5.0.11"."""
    return format_library_name(MPI.Get_library_version())


def format_library_name(text: str) -> str:
    """Returns name and version from a library's version text."""
    first = re.split(r"[,\n]", text.strip())[0]
    return re.sub(r"\s*\bversion:?\s*|\s+v(?=\d)", " ", first, flags=re.IGNORECASE).strip()


def open_library() -> ctypes.CDLL | None:
    """Opens the MPI library of this process, for functions that mpi4py does not have; None if it is not found."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    path = next((line.split()[-1] for line in mapped.splitlines() if _LIBRARY.search(line)), None)
    return None if path is None else ctypes.CDLL(path)


def query_device_buffers(library: ctypes.CDLL | None) -> bool | None:
    """Whether the library can send GPU memory, once MPI has been started; None if it does not say."""
    if library is None:
        return None
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI, MPICH
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # some that are derived from MPICH
        supported = ctypes.c_int()
        return library.MPIX_GPU_query_support(_CUDA, ctypes.byref(supported)) == 0 and bool(supported.value)
    return None


class MpiTransport(Transport):
    """All ranks of MPI.COMM_WORLD.

    Every call begins with a non-blocking barrier that is polled with growing pauses, because some ranks compute longer
    than others. Only then does the payload move, polled with short pauses: it progresses by one piece per poll.

    Args:
        timeout: seconds that a call waits for the other ranks.
    """

    name = "mpi"

    def __init__(self, timeout: float) -> None:
        super().__init__(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), timeout)
        self.device_buffers = query_device_buffers(open_library())
        self._between_gpus = False
        self._pending: list[MPI.Request] = []  # referenced so that their buffers outlive them
        self._comm = MPI.COMM_WORLD.Dup()  # keeps messages apart from those of other libraries

    def use_gpus(self, ranks: Sequence[int], device: "torch.device") -> None:
        """Send from GPU to GPU from now on; the libraries of all ranks must be able to. See the base class."""
        self._between_gpus = True

    def takes_gpu_memory(self, size: int, peer: int | None = None) -> bool:
        return self._between_gpus and size >= SMALLEST_GPU_MESSAGE

    def abort(self, code: int) -> NoReturn:
        """Stop all ranks; the launcher ends with the exit code."""
        flush_output()
        time.sleep(_FORWARD_SECONDS)
        self._comm.Abort(code)
        os._exit(code)

    def _broadcast(self, buffer: Buffer) -> None:
        with self._collective("broadcast"):
            wait_for_kernels(buffer)
            for chunk in chunks(buffer, self.max_message):
                if self.takes_gpu_memory(len(buffer)):
                    # Blocking: Open MPI takes no memory of GPUs in non-blocking collectives.
                    self._comm.Bcast([chunk, MPI.BYTE], root=0)
                else:
                    self._move([self._comm.Ibcast([chunk, MPI.BYTE], root=0)])

    def _exchange(self, sent: dict[int, Buffer], received: dict[int, Buffer]) -> None:
        with self._collective("exchange"):
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
        with self._collective("barrier"):
            pass

    def _close(self) -> None:
        self.barrier()  # MPI_Finalize waits for all ranks without a time limit and without a pause
        self._comm.Free()
        if self._goes_on:  # a process cannot start MPI again
            atexit.register(_finalize_at_exit)
        else:
            MPI.Finalize()

    @contextmanager
    def _collective(self, operation: str) -> Iterator[None]:
        """Wait until all ranks have entered the call; translate MPI's errors and timeouts to `TransportError`."""
        try:
            barrier = self._comm.Ibarrier()
            self._pending = [barrier]
            wait(lambda: barrier.Test() or is_roll_called(self._comm), self.timeout)
            if not barrier.Test():  # another rank's time is up
                raise WaitTimeout(self.timeout)
            yield
            self._pending = []
        except MPI.Exception as error:
            raise TransportError(describe_loss(operation, error, describe_ended(self.peers))) from error
        except WaitTimeout as timeout:
            absent = describe_ranks(call_roll(self._comm), self.peers)
            raise TransportError(describe_timeout(operation, timeout.seconds, absent)) from timeout

    def _move(self, requests: list[MPI.Request]) -> None:
        self._pending += requests
        wait(lambda: MPI.Request.Testall(requests), self.timeout, longest=SHORTEST_PAUSE)


def _finalize_at_exit() -> None:
    """Finalize MPI when the process ends; abort all ranks if it ends by an error, because they would wait for it."""
    flush_output()
    if hasattr(sys, "last_value"):
        MPI.COMM_WORLD.Abort(1)
    if not MPI.Is_finalized():
        MPI.Finalize()


def is_roll_called(comm: MPI.Intracomm) -> bool:
    """Whether another rank has started a roll call; see `call_roll`."""
    return comm.Iprobe(tag=_ROLL_CALL_TAG)


def call_roll(comm: MPI.Intracomm) -> list[int]:
    """Returns the ranks that do not answer a roll call, which a rank starts at its timeout and waiting ranks join."""
    rank, size = comm.Get_rank(), comm.Get_size()
    silent = set(range(size)) - {rank}
    requests = [comm.Isend(np.ones(1, np.uint8), other, _ROLL_CALL_TAG) for other in sorted(silent)]
    end = time.monotonic() + _ANSWER_SECONDS
    while silent and time.monotonic() < end:
        for other in sorted(silent):
            if comm.Iprobe(source=other, tag=_ROLL_CALL_TAG):
                comm.Recv(np.empty(1, np.uint8), other, _ROLL_CALL_TAG)
                silent.remove(other)
        time.sleep(0.01)
    del requests  # small messages need no completion, and all ranks stop now
    return sorted(silent)


def wait_for_kernels(buffer: Buffer) -> None:
    """Wait for kernels that use this memory, because MPI is not ordered with CUDA streams."""
    if not isinstance(buffer, np.ndarray) and buffer.is_cuda:
        import torch

        torch.cuda.current_stream(buffer.device).synchronize()
