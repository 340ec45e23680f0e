"""What must hold for every transport; each check is called on all ranks alike, and every rank knows what is right."""

from collections.abc import Callable

import numpy as np

from pflmpi.transports.base import Transport

Check = Callable[[Transport], None]
LARGE = 5_000_000


def payload(seed, size):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def same(actual, right):
    """Equal in type, shape and bits; `==` would not tell 0.0 from -0.0."""
    assert actual.dtype == right.dtype and actual.shape == right.shape
    assert actual.tobytes() == right.tobytes()


def check_broadcast(transport, size=1000, seed=1):
    right = payload(seed, size)
    buffer = right.copy() if transport.rank == 0 else np.zeros(size, np.uint8)
    transport.broadcast(buffer)
    same(buffer, right)


def check_broadcast_of_read_only_memory(transport):
    buffer = payload(2, 100) if transport.rank == 0 else np.zeros(100, np.uint8)
    buffer.flags.writeable = transport.rank != 0
    transport.broadcast(buffer)
    same(buffer, payload(2, 100))


def check_gather(transport, sizes=None, seed=4):
    sizes = sizes or [10 + 7 * rank for rank in range(transport.size)]
    parts = [payload(seed + rank, size) for rank, size in enumerate(sizes)]
    gathered = transport.gather(parts[transport.rank], sizes)
    assert (gathered is None) == (transport.rank != 0)
    for part, right in zip(gathered or [], parts, strict=transport.rank == 0):
        same(part, right)


def check_exchange(transport, sizes=None, seed=5, down=False):
    """Every rank has something else, of another size, for every rank."""
    count, rank = transport.size, transport.rank
    sizes = 10 + np.arange(count * count).reshape(count, count) if sizes is None else sizes

    def between(sender, receiver):
        return payload(seed + sender * count + receiver, int(sizes[sender, receiver]))

    sent = {peer: between(rank, peer) for peer in range(count) if sizes[rank, peer]}
    expected_sizes = {sender: int(size) for sender, size in enumerate(sizes[:, rank]) if size}
    received = transport.exchange(sent, expected_sizes, int(sizes.sum() - np.trace(sizes)), down)
    assert received.keys() == expected_sizes.keys() and received.get(rank) is sent.get(rank)
    for sender, part in received.items():
        same(part, between(sender, rank))


def check_some_ranks_have_nothing(transport):
    for sizes in (
        [0] * transport.size,
        [5 * (rank % 2) for rank in range(transport.size)],
        [5 * ((rank + 1) % 2) for rank in range(transport.size)],
    ):
        check_gather(transport, sizes)
        check_exchange(transport, np.outer(sizes, np.ones(transport.size, np.int64)))
        check_exchange(transport, np.outer(np.ones(transport.size, np.int64), sizes))


def check_empty_messages(transport):
    transport.broadcast(np.zeros(0, np.uint8))
    same(transport.maximum(np.zeros(0)), np.zeros(0))


def check_maximum(transport):
    values = np.array([transport.rank, -transport.rank - 1.0, 2.0**-1074 * transport.rank, 0.1])
    last = transport.size - 1
    same(transport.maximum(values), np.array([last, -1.0, 2.0**-1074 * last, 0.1]))
    same(values, np.array([transport.rank, -transport.rank - 1.0, 2.0**-1074 * transport.rank, 0.1]))


def check_maximum_of_special_values(transport):
    last = transport.rank == transport.size - 1
    maximum = transport.maximum(np.array([np.inf if last else 1.0, -np.inf, np.nan if last else np.inf]))
    assert maximum[:2].tolist() == [np.inf, -np.inf] and np.isnan(maximum[2]), "a NaN is not lost"


def check_barrier(transport):
    for _ in range(3):
        transport.barrier()


def check_counters(transport):
    num_others = transport.size - 1
    transport.take_moved()
    with transport.counting():
        check_broadcast(transport, 100)
        check_gather(transport, [7] * transport.size)
        check_exchange(transport, np.full((transport.size, transport.size), 3))
        check_exchange(transport, np.full((transport.size, transport.size), 9), down=True)
    transport.maximum(np.zeros(3))  # what is no message of an algorithm does not count
    check_exchange(transport, np.full((transport.size, transport.size), 5))
    transport.barrier()
    pairs = transport.size * num_others
    assert transport.take_moved() == (100 * num_others + 9 * pairs, 7 * num_others + 3 * pairs)
    assert transport.take_moved() == (0, 0)


def check_large_messages(transport):
    check_broadcast(transport, LARGE)
    check_gather(transport, [LARGE] * transport.size)
    check_exchange(transport, np.full((transport.size, transport.size), LARGE // 4))


def check_a_random_sequence(transport):
    """200 calls of random kinds and sizes: nothing gets out of step, and everything is counted."""
    transport.take_moved()
    with transport.counting():
        moved = make_random_calls(transport)
    assert transport.take_moved() == tuple(moved)


def make_random_calls(transport):
    random = np.random.default_rng(7)
    moved = np.zeros(2, np.int64)
    for step in range(200):
        kind = random.integers(5)
        sizes = [int(size) for size in random.integers(0, 3000, transport.size) * random.integers(0, 2, transport.size)]
        if kind == 0:
            check_broadcast(transport, sizes[0], step)
            moved[0] += sizes[0] * (transport.size - 1)
        elif kind == 1:
            check_gather(transport, sizes, step)
            moved[1] += sum(sizes[1:])
        elif kind == 2:
            values = random.standard_normal((transport.size, sizes[0]))
            same(transport.maximum(values[transport.rank]), values.max(0))
            moved += 8 * sizes[0] * (transport.size - 1)
        elif kind == 3:
            matrix = random.integers(0, 3000, (transport.size, transport.size)) * random.integers(0, 2, transport.size)
            down = bool(step % 2)
            check_exchange(transport, matrix, step, down)
            moved[0 if down else 1] += matrix.sum() - np.trace(matrix)
        else:
            transport.barrier()
    return moved


CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): check for name, check in sorted(globals().items()) if name.startswith("check_")
}
