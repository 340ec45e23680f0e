"""What ranks tell each other: a text of any length each, one text for all, and the time."""

import time

import numpy as np

from pflmpi.doctor.facts import Clock
from pflmpi.transports.base import Transport

_NAME = 1024  # bytes of a text for all
_ROUNDS = 5


def gather_texts(transport: Transport, text: str) -> list[str] | None:
    """Return all ranks' texts on rank 0, None elsewhere."""
    content = np.frombuffer(text.encode(), np.uint8)
    lengths = transport.gather(np.array([len(content)], np.int64).view(np.uint8), [8] * transport.size)
    sizes = np.concatenate(lengths) if lengths is not None else np.empty(8 * transport.size, np.uint8)
    transport.broadcast(sizes)
    parts = transport.gather(content.copy(), sizes.view(np.int64).tolist())
    return None if parts is None else [bytes(part).decode() for part in parts]


def from_root(transport: Transport, text: str) -> str:
    """Return rank 0's text, of at most 1024 bytes, on every rank."""
    buffer = np.frombuffer(text.encode().ljust(_NAME, b"\0"), np.uint8).copy()
    transport.broadcast(buffer)
    return bytes(buffer).rstrip(b"\0").decode()


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
