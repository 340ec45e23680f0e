"""Seconds of collective calls in closed form: delays of the hops one after the other, bytes over the busiest link.

Checked between hosts with delays of 5 to 20 ms and rates of 200 to 1000 Mbit/s. NCCL is taken to be like gloo, and
Open MPI's `coll/han`, which takes over where nodes have several ranks, to be as quick as the algorithms for one level.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pflmpi.messages.calls import Call
from pflmpi.transports import ring

TransportName = Literal["inprocess", "mpi", "torch"]

_WINDOW = 2**21  # bytes in flight on a connection: Linux gives a socket 4 MiB, half of it for its own records
_NUMBER = 8  # bytes of a float64 or int64
_EAGER = 2**16  # bytes; Open MPI sends a larger message once the receiver has answered
_FLAT_BROADCAST, _FLAT_SUM = 4, 7  # ranks up to which Open MPI goes from the root to each, or from each to the root


@dataclass(frozen=True)
class Link:
    """Connection between two ranks.

    Attributes:
        delay: seconds, one way.
        rate: bytes per second.
    """

    delay: float
    rate: float

    def seconds(self, total: float, longest: float, delays: int) -> float:
        """Seconds until messages have arrived that leave together.

        Args:
            total: bytes of all of them; they share the link.
            longest: bytes of one; each has its own connection.
            delays: of the first byte: 1, or more where the receiver is asked first.
        """
        return delays * self.delay + max(total / self.rate, longest / _WINDOW * 2 * self.delay)


@dataclass(frozen=True)
class Network:
    """Ranks on nodes, in blocks: the first ranks on the first node, and so on.

    Attributes:
        ranks: R.
        nodes: N; the ranks are spread evenly.
        within: between two ranks of a node; each pair has its own link.
        between: from node to node; the ranks of a node share one link out and one in.
    """

    ranks: int
    nodes: int
    within: Link
    between: Link

    @property
    def per_node(self) -> int:
        """Ranks of the fullest node."""
        return -(-self.ranks // self.nodes)

    @property
    def slowest(self) -> Link:
        """Link that a message to all ranks waits for."""
        return self.between if self.nodes > 1 else self.within


def communication_seconds(calls: Sequence[Call], network: Network, transport: TransportName) -> float:
    """Seconds of a round's calls, one after the other."""
    if network.ranks == 1 or transport == "inprocess":
        return 0.0
    seconds = _open_mpi if transport == "mpi" else _gloo
    return sum(seconds(call, network) for call in calls if any((*call.sizes[1:], *call.received)))


def _gloo(call: Call, network: Network) -> float:
    """Gloo's algorithms: a message leaves once its receiver has asked for it; who waits in a round has done so."""
    ranks, size = network.ranks, max(call.sizes)
    if call.operation == "broadcast":
        return _tree(network, size, 1)
    if call.operation == "maximum":
        return _small_ring(network, size // _NUMBER)
    if call.operation == "sum":  # in pieces: around a ring, then each rank sends the root its part
        pieces = -(-size // ring.piece(ranks))
        part = size / pieces / ranks
        links = [network.between] if network.nodes == ranks else [network.within, network.slowest]
        step = max(link.seconds(part, part, 2) for link in links)
        return pieces * ((ranks - 1) * step + _star(network, [part] * ranks, 1))
    if call.operation == "all-to-all":
        return _all_to_all(network, call, 1)
    return _star(network, call.sizes, 1)


def _open_mpi(call: Call, network: Network) -> float:
    """Open MPI 5's algorithms after a barrier, which takes the hops of a tree; a large message is asked for."""
    ranks, size = network.ranks, max(call.sizes[1:])
    delays = 1 if size <= _EAGER else 3
    barrier = _up_tree(network, 0, 1)
    if call.operation == "all-to-all":
        return barrier + _all_to_all(network, call, delays)
    if call.operation == "maximum":  # up a tree, and down
        return barrier + _up_tree(network, size, delays) + _tree(network, size, delays)
    if call.operation == "broadcast" and ranks > _FLAT_BROADCAST:
        return barrier + _tree(network, size, delays)
    if call.operation == "sum" and ranks > _FLAT_SUM:
        return barrier + _up_tree(network, size, delays)
    if call.operation == "sum" and size > _EAGER:  # the root asks one rank after the other
        far, near = ranks - network.per_node, network.per_node - 1
        return barrier + far * network.between.seconds(size, size, 2) + near * network.within.seconds(size, size, 2)
    return barrier + _star(network, call.sizes, delays)


def _tree(network: Network, size: int, delays: int) -> float:
    """Down a binomial tree, over the nodes and then within each: a rank sends to all below it at once."""
    near, far = _fan_out(network.per_node), _fan_out(network.nodes)
    if far:  # all ranks of the first node send
        far[0] = min(far[0] * network.per_node, network.ranks - network.per_node)
    steps = [(network.between, copies) for copies in far] + [(network.within, copies) for copies in near]
    return sum(link.seconds(copies * size, size, delays) for link, copies in steps)


def _up_tree(network: Network, size: int, delays: int) -> float:
    """Up a binomial tree, within each node and then over them; each rank sends one message."""
    steps = ((network.within, network.per_node), (network.between, network.nodes))
    return sum((count - 1).bit_length() * link.seconds(size, size, delays) for link, count in steps)


def _star(network: Network, sizes: Sequence[float], delays: int) -> float:
    """All parts but rank 0's at once, to it or from it."""
    near, far = sizes[1 : network.per_node], sizes[network.per_node :]
    parts = [(network.within, near), (network.between, far)]
    return max(link.seconds(sum(part), max(part), delays) for link, part in parts if any(part))


def _all_to_all(network: Network, call: Call, delays: int) -> float:
    """All parts at once, from each rank to each that receives, as much to one as to another."""
    part = max(call.sizes) / max(sum(map(bool, call.received)) - 1, 1)
    within = network.within.seconds(part, part, delays) if network.per_node > 1 else 0.0
    if network.nodes == 1:
        return within
    away = (network.ranks - network.per_node) / (network.ranks - 1)  # the share that leaves a node, or enters it
    nodes = range(0, network.ranks, network.per_node)
    most = max(sum(way[first : first + network.per_node]) for way in (call.sizes, call.received) for first in nodes)
    return max(within, network.between.seconds(most * away, part, delays))


def _small_ring(network: Network, values: int) -> float:
    """Twice around the ring with a few values, one behind the other; with many, each step has a second delay."""
    stops = network.nodes if network.nodes > 1 else network.ranks
    hops = min(2 * (stops - 1) + values - 1, 4 * (network.ranks - 1))
    return hops * network.slowest.delay + 2 * (network.ranks - stops) * network.within.delay


def _fan_out(count: int) -> list[int]:
    """Messages that the ranks on the longest way down a binomial tree send at once, each rank its own.

    >>> _fan_out(8), _fan_out(5), _fan_out(3), _fan_out(1)
    ([3, 2, 1], [3, 1], [2], [])
    """
    found = [(count - 2**step).bit_length() - step for step in range(count.bit_length()) if count > 2**step]
    return [messages for messages in found if messages > 0]
