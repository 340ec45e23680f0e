"""How far the clocks of the ranks are apart."""

import time

import numpy as np

from pflmpi.doctor.facts import Clock
from pflmpi.transports.base import Transport

_ROUNDS = 5


def clocks(transport: Transport) -> list[Clock]:
    """Return how far each rank's clock is ahead of rank 0's; [] on the other ranks.

    A rank reads its clock after it has heard from rank 0 and before rank 0 hears from it, so its time is one between
    the two that rank 0 reads. The shortest of a few exchanges says it best.
    """
    best: list[Clock] = []
    for _ in range(_ROUNDS):
        transport.barrier()
        before = time.time()
        transport.broadcast(np.zeros(1, np.uint8))
        times = transport.gather(np.array([time.time()]).view(np.uint8), [8] * transport.size)
        after = time.time()
        if times is not None and (not best or after - before < 2 * best[0].within):
            middle, within = (before + after) / 2, (after - before) / 2
            read = np.concatenate(times).view(np.float64)
            best = [Clock(ahead=float(each) - middle, within=within) for each in read]
    return best
