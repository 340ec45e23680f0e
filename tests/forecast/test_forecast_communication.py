"""Seconds of calls, counted by hand: delays of a second, or rates of a byte per second."""

import pytest

from pflmpi.forecast.communication import Link, Network, communication_seconds
from pflmpi.messages.calls import Call

SLOW = Link(delay=1.0, rate=float("inf"))  # only delays count
CLOSE = 1e-4  # what a connection has in flight at most counts with a few microseconds
NARROW = Link(delay=0.0, rate=1.0)  # only bytes count
FREE = Link(delay=0.0, rate=float("inf"))
LARGE = 3 * 2**20  # bytes; Open MPI asks before it sends as many


def network(ranks: int, link: Link, nodes: int = 0) -> Network:
    return Network(ranks, nodes or ranks, link, link)


def call(operation: str, size: int, ranks: int) -> Call:
    return Call(operation, (size,) * ranks)


@pytest.mark.parametrize("transport", ["mpi", "torch"])
def test_one_rank_talks_to_nobody(transport: str) -> None:
    assert communication_seconds([call("sum", 8, 1)], network(1, SLOW), transport) == 0.0


def test_a_message_costs_its_delay_and_its_bytes() -> None:
    found = communication_seconds([call("gather", 8, 2)], network(2, Link(3.0, 4.0)), "torch")
    assert found == pytest.approx(3.0 + 2.0)


def test_calls_follow_each_other() -> None:
    calls = [call("gather", 8, 2), call("broadcast", 4, 2)]
    assert communication_seconds(calls, network(2, Link(3.0, 4.0)), "torch") == pytest.approx(2 * 3.0 + 2.0 + 1.0)


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_messages_between_nodes_share_the_link_of_their_node(operation: str) -> None:
    spread = Network(4, 2, FREE, NARROW)
    assert communication_seconds([Call(operation, (1, 9, 5, 7))], spread, "torch") == pytest.approx(5 + 7)


def test_messages_that_stay_on_a_node_do_not_wait_for_those_that_leave_it() -> None:
    spread = Network(3, 2, NARROW, NARROW)  # ranks 0 and 1 on the first node
    assert communication_seconds([Call("gather", (0, 9, 7))], spread, "torch") == pytest.approx(9)


@pytest.mark.parametrize(
    ("operation", "size", "ranks", "seconds"),
    [
        # Before each call a barrier: one delay for 2 ranks, two for 3 or 4, three for 5 to 8.
        ("broadcast", 8, 2, 1 + 1),
        ("broadcast", 8, 4, 2 + 1),  # from the root to each
        ("broadcast", 8, 5, 3 + 2),  # down a tree: from 0 to 1, and from there to 3
        ("broadcast", 8, 8, 3 + 3),
        ("gather", 8, 2, 1 + 1),
        ("gather", 8, 4, 2 + 1),
        ("scatter", 8, 4, 2 + 1),
        ("maximum", 8, 2, 1 + 1 + 1),  # up and down
        ("maximum", 8, 8, 3 + 3 + 3),
        ("sum", 8, 4, 2 + 1),  # every rank to the root
        ("sum", 8, 8, 3 + 3),  # up a tree
        ("gather", LARGE, 4, 2 + 3 + 3),  # asked, answered, sent; 2 MiB are in flight at most, so 3 MiB take 3 delays
        ("sum", LARGE, 4, 2 + 3 * (2 + 3)),  # the root takes three ranks in turn
    ],
)
def test_delays_of_open_mpi(operation: str, size: int, ranks: int, seconds: float) -> None:
    found = communication_seconds([call(operation, size, ranks)], network(ranks, SLOW), "mpi")
    assert found == pytest.approx(seconds, rel=CLOSE)


@pytest.mark.parametrize(
    ("operation", "size", "ranks", "seconds"),
    [
        ("broadcast", 8, 2, 1),
        ("broadcast", 8, 3, 1),  # the root sends to both
        ("broadcast", 8, 5, 2),
        ("broadcast", 8, 8, 3),
        ("gather", 8, 2, 1),
        ("scatter", 8, 5, 1),
        ("maximum", 8, 2, 2),  # one value passes 2 (R - 1) links
        ("maximum", 8, 5, 8),
        ("maximum", 16, 5, 9),  # a second one follows it
        ("maximum", 8000, 5, 16),  # a full ring: two delays for each of 2 (R - 1) steps
        ("sum", 8000, 5, 4 * 2 + 1),  # around the ring, then to the root
    ],
)
def test_delays_of_gloo(operation: str, size: int, ranks: int, seconds: float) -> None:
    found = communication_seconds([call(operation, size, ranks)], network(ranks, SLOW), "torch")
    assert found == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("transport", "operation", "ranks", "copies"),
    [
        ("mpi", "broadcast", 3, 2.0),  # the root sends one to each
        ("mpi", "broadcast", 8, 6.0),  # three from the root, two from the first of those, one from its first
        ("mpi", "sum", 3, 2.0),  # the root takes one from each
        ("mpi", "sum", 8, 3.0),  # one at each level of a tree
        ("torch", "broadcast", 3, 2.0),
        ("torch", "broadcast", 8, 6.0),
        ("torch", "sum", 4, 1.5),  # 3/4 around the ring, 3/4 into the root
        ("mpi", "gather", 4, 3.0),
        ("torch", "gather", 4, 3.0),
        ("torch", "scatter", 4, 3.0),
    ],
)
def test_bytes_of_large_calls_on_the_busiest_link(transport: str, operation: str, ranks: int, copies: float) -> None:
    size = 8 * 10**6
    found = communication_seconds([call(operation, size, ranks)], network(ranks, NARROW), transport)
    assert found == pytest.approx(copies * size)


def test_a_broadcast_to_nodes_leaves_the_first_once_for_each_of_its_ranks() -> None:
    """Each of two ranks of node 0 sends to one of node 1; within the nodes the copies cost nothing."""
    found = communication_seconds([call("broadcast", 1000, 4)], Network(4, 2, FREE, NARROW), "torch")
    assert found == pytest.approx(2 * 1000)


@pytest.mark.parametrize("transport", ["mpi", "torch"])
def test_ranks_of_one_node_need_not_cross_the_slow_link(transport: str) -> None:
    calls = [call("sum", 8000, 4), call("broadcast", 4000, 4)]
    near = Link(1e-6, 1e9)
    spread, packed = (Network(4, nodes, near, Link(1e-2, 1e6)) for nodes in (4, 1))
    some = Network(4, 2, near, Link(1e-2, 1e6))
    seconds = [communication_seconds(calls, one, transport) for one in (packed, some, spread)]
    assert seconds == sorted(seconds)
    assert seconds[0] < 1e-3 < seconds[1] < seconds[2]


@pytest.mark.parametrize(("transport", "barrier"), [("mpi", 2), ("torch", 0)])
def test_an_all_to_all_takes_one_delay_after_its_barrier(transport: str, barrier: int) -> None:
    everyone = Call("all-to-all", (30,) * 4, (30,) * 4)
    assert communication_seconds([everyone], network(4, SLOW), transport) == pytest.approx(barrier + 1, rel=CLOSE)


@pytest.mark.parametrize("transport", ["mpi", "torch"])
def test_bytes_of_an_all_to_all_on_the_busiest_link(transport: str) -> None:
    few = Call("all-to-all", (0, 600, 600, 600), (900, 300, 300, 300))  # rank 0 has nothing to send
    assert communication_seconds([few], network(4, NARROW), transport) == pytest.approx(900)
    pairs = Network(4, 2, NARROW, NARROW)  # two of the three others are on the other node
    assert communication_seconds([few], pairs, transport) == pytest.approx(1200 * 2 / 3)
    assert communication_seconds([few], network(4, NARROW, 1), transport) == pytest.approx(200)  # each pair has a link


def test_parts_of_no_bytes_are_not_sent() -> None:
    calls = [Call("gather", (0, 0, 8)), Call("sum", (0, 0, 0)), Call("scatter", (8, 0, 0))]
    assert communication_seconds(calls, network(3, SLOW), "torch") == pytest.approx(1.0, rel=CLOSE)


def test_a_long_way_cannot_be_filled_by_one_connection() -> None:
    """A connection has 2 MiB in flight: over 0.1 s there and back 64 MiB take 3.2 s, however wide the link is."""
    link = Link(0.05, 1e12)
    found = communication_seconds([call("gather", 2**26, 2)], network(2, link), "torch")
    assert found == pytest.approx(3.2 + 0.05)
