"""Seconds of calls, small enough to be counted by hand: delays of a second, or rates of a byte per second."""

import numpy as np
import pytest

from pflmpi.forecast.communication import Call, communication_seconds
from pflmpi.forecast.network import Link, Network, NetworkSimulator

SLOW = Link(delay=1.0, rate=float("inf"))  # only delays count
CLOSE = 1e-4  # what a connection has under way at most counts with a few microseconds
NARROW = Link(delay=0.0, rate=1.0)  # only bytes count


def network(ranks: int, link: Link, nodes: int = 0) -> Network:
    return Network(ranks, nodes or ranks, link, link)


def call(operation: str, size: int, ranks: int) -> Call:
    return Call(operation, (size,) * ranks)


@pytest.mark.parametrize("transport", ["mpi", "torch"])
def test_one_rank_talks_to_nobody(transport: str) -> None:
    assert communication_seconds([call("sum", 8, 1)], network(1, SLOW), transport) == 0.0


def test_a_message_costs_its_delay_and_its_bytes() -> None:
    clocks = NetworkSimulator(network(2, Link(3.0, 4.0)))
    arrived = clocks.move(np.array([0]), np.array([1]), np.array([10.0]), np.array([8]))
    assert arrived.tolist() == [10.0 + 3.0 + 2.0]


def test_messages_that_leave_a_node_together_share_its_link() -> None:
    clocks = NetworkSimulator(Network(4, 2, Link(0.0, float("inf")), NARROW))
    sources, targets = np.array([0, 1]), np.array([2, 3])  # from node 0 to node 1
    assert clocks.move(sources, targets, np.zeros(2), np.array([5, 7])).tolist() == [12.0, 12.0]


def test_messages_that_stay_on_a_node_do_not_wait_for_those_that_leave_it() -> None:
    clocks = NetworkSimulator(Network(4, 2, Link(0.0, float("inf")), NARROW))
    arrived = clocks.move(np.array([0, 0]), np.array([2, 1]), np.zeros(2), np.array([9, 9]))
    assert arrived.tolist() == [9.0, 0.0]


def test_a_later_message_waits_until_the_link_is_free() -> None:
    clocks = NetworkSimulator(network(2, NARROW))
    first = clocks.move(np.array([0]), np.array([1]), np.zeros(1), np.array([10]))
    second = clocks.move(np.array([0]), np.array([1]), np.array([4.0]), np.array([2]))
    assert (first.tolist(), second.tolist()) == ([10.0], [12.0])


@pytest.mark.parametrize(
    ("operation", "ranks", "seconds"),
    [
        # In a meeting each of two ranks hears from the other, in 1 s; who came late need not wait for it.
        ("broadcast", 2, 2.0),
        ("gather", 2, 2.0),
        ("maximum", 2, 2.0),  # up and down: rank 0 is late for the next meeting
        ("scatter", 4, 3.0),  # a meeting of four ranks takes two steps
        ("gather", 4, 3.0),
    ],
)
def test_delays_of_small_calls_over_mpi(operation: str, ranks: int, seconds: float) -> None:
    assert communication_seconds([call(operation, 8, ranks)], network(ranks, SLOW), "mpi") == pytest.approx(
        seconds, rel=CLOSE
    )


@pytest.mark.parametrize(
    ("operation", "ranks", "seconds"),
    [
        # A message leaves a second after its receiver has asked for it, and comes a second later.
        ("broadcast", 2, 2.0),
        ("gather", 2, 2.0),
        ("gather", 5, 2.0),
        ("maximum", 2, 2.0),
        ("maximum", 3, 5.0),  # as measured between hosts: R + 2 for one number
        ("maximum", 5, 7.0),
    ],
)
def test_delays_of_small_calls_over_gloo(operation: str, ranks: int, seconds: float) -> None:
    assert communication_seconds([call(operation, 8, ranks)], network(ranks, SLOW), "torch") == pytest.approx(
        seconds, rel=CLOSE
    )


@pytest.mark.parametrize(
    ("transport", "operation", "ranks", "copies"),
    [
        ("mpi", "broadcast", 3, 2.0),  # the root sends one to each
        ("mpi", "broadcast", 8, 6.0),  # three from the root, two from the first of those, one from its first
        ("mpi", "sum", 3, 2.0),  # the root takes one from each
        ("torch", "broadcast", 3, 2.0),
        ("torch", "sum", 4, 1.5),  # 3/4 around the ring, 3/4 into the root
        ("mpi", "gather", 4, 3.0),
        ("torch", "gather", 4, 3.0),
        ("torch", "scatter", 4, 3.0),
    ],
)
def test_bytes_of_large_calls_on_the_busiest_link(transport: str, operation: str, ranks: int, copies: float) -> None:
    size = 8 * 10**6
    found = communication_seconds([call(operation, size, ranks)], network(ranks, NARROW), transport)
    assert found == pytest.approx(copies * size, rel=0.1)  # pieces of a ring do not overlap wholly


@pytest.mark.parametrize("transport", ["mpi", "torch"])
def test_ranks_of_one_node_need_not_cross_the_slow_link(transport: str) -> None:
    calls = [call("sum", 8000, 4), call("broadcast", 4000, 4)]
    near = Link(1e-6, 1e9)
    spread, packed = (Network(4, nodes, near, Link(1e-2, 1e6)) for nodes in (4, 1))
    some = Network(4, 2, near, Link(1e-2, 1e6))
    seconds = [communication_seconds(calls, one, transport) for one in (packed, some, spread)]
    assert seconds == sorted(seconds)
    assert seconds[0] < 1e-3 < seconds[1] < seconds[2]


def test_parts_of_no_bytes_are_not_sent() -> None:
    calls = [Call("gather", (0, 0, 8)), Call("sum", (0, 0, 0))]
    assert communication_seconds(calls, network(3, SLOW), "torch") == pytest.approx(2.0, rel=CLOSE)


def test_a_long_way_cannot_be_filled_by_one_connection() -> None:
    """A connection has 2 MiB under way: over 0.1 s there and back 64 MiB take 3.2 s, however wide the way is."""
    link = Link(0.05, 1e12)
    found = communication_seconds([call("gather", 2**26, 2)], network(2, link), "torch")
    assert found == pytest.approx(3.2 + 0.05, rel=0.05)
