"""Who is there: when a rank's time is up, every rank that waits answers, and the silent ones have not come."""

import time
from typing import Any

import numpy as np

_GRACE = 3.0  # seconds to answer; a rank that waits looks for a call every few milliseconds
_TAG = 2

Communicator = Any  # mpi4py's; only `mpi.py` imports it


def heard(comm: Communicator) -> bool:
    """Return whether a rank has called the roll."""
    return bool(comm.Iprobe(tag=_TAG))


def absent(comm: Communicator) -> list[int]:
    """Call the roll, or answer one, and return the ranks that are silent."""
    rank, size = comm.Get_rank(), comm.Get_size()
    here = {rank}
    requests = [comm.Isend(np.ones(1, np.uint8), other, _TAG) for other in range(size) if other != rank]
    end = time.monotonic() + _GRACE
    while len(here) < size and time.monotonic() < end:
        for other in set(range(size)) - here:
            if comm.Iprobe(source=other, tag=_TAG):
                comm.Recv(np.empty(1, np.uint8), other, _TAG)
                here.add(other)
        time.sleep(0.01)
    del requests  # small messages need no end; the ranks stop now
    return sorted(set(range(size)) - here)
