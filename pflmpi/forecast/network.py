"""Messages between ranks in time: each takes its way's delay, and shares the links of its node with others."""

from dataclasses import dataclass

import numpy as np

# What one connection has under way at most: Linux gives a socket a buffer of 4 MiB, half of it for its own records.
_WINDOW = 2**21


@dataclass(frozen=True)
class Link:
    """One way between two ranks.

    Attributes:
        delay: seconds from one to the other.
        rate: bytes per second.
    """

    delay: float
    rate: float


@dataclass(frozen=True)
class Network:
    """Ranks on nodes, in blocks: the first ranks on the first node, and so on.

    Attributes:
        ranks: R.
        nodes: N; the ranks are spread as evenly as they can be.
        within: two ranks of one node; every pair has a link of its own.
        between: two ranks of different nodes; each node has one such link out and one in, for all of its ranks.
    """

    ranks: int
    nodes: int
    within: Link
    between: Link


class NetworkSimulator:
    """How late it is on every rank, and when each link is free again.

    Attributes:
        now: [R] seconds.
        ranks: R.
    """

    def __init__(self, network: Network) -> None:
        self.ranks = network.ranks
        self.now = np.zeros(network.ranks)
        self._network = network
        self._node = np.array(nodes_of(network.ranks, network.nodes))
        links = network.nodes + network.ranks  # of nodes, then one of each rank for what stays in its node
        self._out, self._in = np.zeros(links), np.zeros(links)

    def far(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return [M] bool, whether two ranks are on different nodes."""
        return np.array(self._node[sources] != self._node[targets])

    def delay(self, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return [M] seconds, one way."""
        far, near = self._network.between.delay, self._network.within.delay
        return np.array(np.where(self.far(sources, targets), far, near))

    def move(self, sources: np.ndarray, targets: np.ndarray, ready: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return [M] seconds at which messages have arrived that are ready to leave at given times.

        Messages that are on a link at the same time share it evenly, so they arrive together.

        Args:
            sources, targets: [M] ranks.
            ready: [M] seconds.
            sizes: [M] bytes.
        """
        far, delay = self.far(sources, targets), self.delay(sources, targets)
        rate = np.where(far, self._network.between.rate, self._network.within.rate)
        out = np.where(far, self._node[sources], self._network.nodes + sources)
        into = np.where(far, self._node[targets], self._network.nodes + targets)
        seconds = sizes / rate
        begun, left = _pass(self._out, out, ready, seconds)
        _, arrived = _pass(self._in, into, begun + delay, seconds)
        alone = begun + delay + sizes / _WINDOW * 2 * delay
        return np.array(np.maximum.reduce([left + delay, arrived, alone]))


def _pass(free: np.ndarray, links: np.ndarray, ready: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when each message [M] begins to pass its link, and when it has passed; `free` is brought up to date."""
    begun = np.maximum(free[links], ready)  # messages of earlier calls are on the link before
    if len(np.unique(links)) == len(links):
        free[links] = begun + seconds
        return begun, free[links]
    passed = np.empty(len(links))
    together: dict[int, list[int]] = {}  # by link, the messages that are under way at once
    for message in np.argsort(begun, kind="stable").tolist():
        link = int(links[message])
        if begun[message] >= free[link]:
            together[link] = []
        together[link].append(message)
        free[link] = max(free[link], begun[message]) + seconds[message]
        passed[together[link]] = free[link]
    return begun, passed


def tree(ranks: int) -> list[tuple[int, np.ndarray]]:
    """Return whom each rank of a binomial tree sends to, all at once, in the order in which a message reaches them.

    >>> [(source, targets.tolist()) for source, targets in tree(6)]
    [(0, [1, 2, 4]), (1, [3, 5]), (2, []), (3, []), (4, []), (5, [])]
    """
    steps = [2**k for k in range((ranks - 1).bit_length())]
    found = []
    for source in range(ranks):
        targets = [source + step for step in steps if step > source and source + step < ranks]
        found.append((source, np.array(targets, np.int64)))
    return found


def nodes_of(ranks: int, nodes: int) -> list[int]:
    """Return the node of each rank, in blocks as even as they can be.

    >>> nodes_of(5, 3)
    [0, 0, 1, 1, 2]
    """
    return [node for node in range(nodes) for _ in range(ranks // nodes + (node < ranks % nodes))]
