"""Who is missing: when the time of one rank of MPI is up, all that wait answer it."""

import time

import numpy as np

from pflmpi.transports.mpi_start import MPI

_TAG = 2  # payload has another, so that a roll call does not mix with it
_ANSWER = 3.0  # seconds to answer; a waiting rank looks for a call every few milliseconds


def was_called(comm: MPI.Intracomm) -> bool:
    """Whether another rank has called the roll."""
    return comm.Iprobe(tag=_TAG)


def absent(comm: MPI.Intracomm) -> list[int]:
    """Ranks that do not answer a roll call: called when a rank's time is up, every waiting rank joins in."""
    rank, size = comm.Get_rank(), comm.Get_size()
    silent = set(range(size)) - {rank}
    requests = [comm.Isend(np.ones(1, np.uint8), other, _TAG) for other in sorted(silent)]
    end = time.monotonic() + _ANSWER
    while silent and time.monotonic() < end:
        for other in sorted(silent):
            if comm.Iprobe(source=other, tag=_TAG):
                comm.Recv(np.empty(1, np.uint8), other, _TAG)
                silent.remove(other)
        time.sleep(0.01)
    del requests  # small messages need no completion; the ranks stop now
    return sorted(silent)
