"""How the transport over MPI moves its calls, in time: the algorithms of Open MPI 5 for the calls in `transports/mpi`.

Found by counting bytes and timing calls between hosts with delays of 5 to 20 ms. They hold where ranks are on one
node or alone on theirs; `coll/han`, which takes over where nodes have several ranks, is taken to be as quick.
"""

import numpy as np

from pflmpi.forecast.network import NetworkSimulator, tree

_EAGER = 2**16  # bytes; a larger message asks first, and comes when the receiver has answered
_FLAT = 4  # ranks up to which a broadcast goes from the root to each
_FLAT_SUM = 7  # ranks up to which a sum is taken by the root, one rank after the other


def meet(clocks: NetworkSimulator) -> None:
    """A barrier: in step k every rank hears from the one 2**k before it."""
    ranks = np.arange(clocks.ranks)
    step = 1
    while step < clocks.ranks:
        targets = (ranks + step) % clocks.ranks
        arrived = clocks.move(ranks, targets, clocks.now, np.zeros(clocks.ranks))
        heard = np.empty(clocks.ranks)
        heard[targets] = arrived
        clocks.now = np.maximum(clocks.now, heard)
        step *= 2


def broadcast(clocks: NetworkSimulator, size: int) -> None:
    """Meet; then from the root to each rank, or down a binomial tree."""
    meet(clocks)
    if clocks.ranks <= _FLAT:
        targets = np.arange(1, clocks.ranks)
        _send(clocks, np.zeros_like(targets), targets, np.full(len(targets), size))
        return
    _down(clocks, size)


def maximum(clocks: NetworkSimulator, size: int) -> None:
    """Meet; then up a binomial tree, and down."""
    meet(clocks)
    _up(clocks, size)
    _down(clocks, size)


def total(clocks: NetworkSimulator, size: int) -> None:
    """Meet; then the root takes one rank's part after the other, or the parts come up a binomial tree."""
    meet(clocks)
    if clocks.ranks > _FLAT_SUM:
        _up(clocks, size)
        return
    for rank in range(clocks.ranks - 1, 0, -1):
        _send(clocks, np.array([rank]), np.array([0]), np.array([size]))


def exchange(clocks: NetworkSimulator, sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray) -> None:
    """Meet; then all messages at once."""
    meet(clocks)
    _send(clocks, sources, targets, sizes)


def _up(clocks: NetworkSimulator, size: int) -> None:
    step = 1
    while step < clocks.ranks:
        sources = np.arange(step, clocks.ranks, 2 * step)
        _send(clocks, sources, sources - step, np.full(len(sources), size))
        step *= 2


def _down(clocks: NetworkSimulator, size: int) -> None:
    for source, targets in tree(clocks.ranks):
        ready = np.full(len(targets), clocks.now[source])
        sources = np.full(len(targets), source)
        clocks.now[targets] = _arrival(clocks, sources, targets, ready, np.full(len(targets), size))


def _send(clocks: NetworkSimulator, sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray) -> None:
    """Move messages; a receiver goes on when it has all of its own, a sender when large ones are asked for."""
    if not len(sizes):
        return
    arrived = _arrival(clocks, sources, targets, clocks.now[sources], sizes)
    answered = np.where(sizes > _EAGER, arrived - clocks.delay(sources, targets), clocks.now[sources])
    np.maximum.at(clocks.now, sources, answered)
    np.maximum.at(clocks.now, targets, arrived)


def _arrival(
    clocks: NetworkSimulator, sources: np.ndarray, targets: np.ndarray, ready: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """Return [M] seconds at which the receivers, which ask for them as soon as they can, have the messages."""
    delay = clocks.delay(sources, targets)
    asked = np.maximum(ready + delay, clocks.now[targets]) + delay
    arrived = clocks.move(sources, targets, np.where(sizes > _EAGER, asked, ready), sizes)
    return np.array(np.maximum(arrived, clocks.now[targets]))
