"""How the transport over torch.distributed moves its calls, in time: gloo's algorithms for those in `torchdist`.

A message leaves once its receiver has said that it waits for it, so it costs a delay more where both come together.
Found by counting bytes and timing calls between hosts with delays of 5 to 20 ms. NCCL is taken to be like it.
"""

import numpy as np

from pflmpi.forecast.network import NetworkSimulator, tree
from pflmpi.transports import ring


def broadcast(clocks: NetworkSimulator, size: int) -> None:
    """Down a binomial tree."""
    for source, targets in tree(clocks.ranks):
        exchange(clocks, np.full(len(targets), source), targets, np.full(len(targets), size))


def everywhere(clocks: NetworkSimulator, size: int) -> None:
    """All-reduce: segments go around the ring once to be reduced, and once more to be known by all."""
    _ring(clocks, size, first=1)
    _ring(clocks, size, first=0)


def total(clocks: NetworkSimulator, size: int) -> None:
    """Reduce, piece by piece: segments go around the ring to be reduced, then each rank sends the root its part."""
    most = ring.piece(clocks.ranks)
    for start in range(0, size, most):
        piece = min(size - start, most)
        _ring(clocks, piece, first=1)
        part = ring.SEGMENTS * ring.segment(piece, clocks.ranks)
        sizes = np.clip(piece - np.arange(clocks.ranks) * part, 0, part)
        sources = np.flatnonzero(sizes[1:] > 0) + 1
        exchange(clocks, sources, np.zeros_like(sources), sizes[sources])


def exchange(clocks: NetworkSimulator, sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray) -> None:
    """All messages at once."""
    if not len(sizes):
        return
    said = clocks.now[targets] + clocks.delay(targets, sources)
    ready = np.maximum(clocks.now[sources], said)
    arrived = clocks.move(sources, targets, ready, sizes)
    np.maximum.at(clocks.now, sources, ready)
    np.maximum.at(clocks.now, targets, arrived)


def _ring(clocks: NetworkSimulator, size: int, first: int) -> None:
    """Each rank sends segment after segment to the rank before it, two under way at a time.

    Args:
        first: how many ranks after its own the part is that a rank begins with.
    """
    segment, count = ring.segment(size, clocks.ranks), ring.SEGMENTS * clocks.ranks
    ranks = np.arange(clocks.ranks)
    before = (ranks - 1) % clocks.ranks
    waits: list[np.ndarray] = []  # for each step, when a rank may go on after it
    for step in range(count - ring.SEGMENTS):
        if step >= 2:
            clocks.now = np.maximum(clocks.now, waits[step - 2])
        offset = ((ranks + first) * ring.SEGMENTS + step) % count * segment
        sizes = np.clip(size - offset, 0, segment)
        moved = np.flatnonzero(sizes > 0)
        sources, targets = ranks[moved], before[moved]
        said = clocks.now[targets] + clocks.delay(targets, sources)
        ready = np.maximum(clocks.now[sources], said)
        until = clocks.now.copy()
        until[sources] = ready
        until[targets] = np.maximum(until[targets], clocks.move(sources, targets, ready, sizes[moved]))
        waits.append(until)
    for until in waits[-2:]:
        clocks.now = np.maximum(clocks.now, until)
