"""What must hold for every transport; each check is called on all ranks alike, and every rank knows what is right."""

from collections.abc import Callable

import numpy as np

from pflmpi.transports.base import Transport

Check = Callable[[Transport], None]
LARGE = 5_000_000


def payload(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def same(found: np.ndarray | None, right: np.ndarray) -> None:
    """Equal in type, shape and bits; `==` would not tell 0.0 from -0.0."""
    assert found is not None
    assert found.dtype == right.dtype and found.shape == right.shape
    assert found.tobytes() == right.tobytes()


def check_broadcast(transport: Transport, size: int = 1000, seed: int = 1) -> None:
    right = payload(seed, size)
    buffer = right.copy() if transport.rank == 0 else np.zeros(size, np.uint8)
    transport.broadcast(buffer)
    same(buffer, right)


def check_broadcast_of_read_only_memory(transport: Transport) -> None:
    buffer = payload(2, 100) if transport.rank == 0 else np.zeros(100, np.uint8)
    buffer.flags.writeable = transport.rank != 0
    transport.broadcast(buffer)
    same(buffer, payload(2, 100))


def check_scatter(transport: Transport, sizes: list[int] | None = None, seed: int = 3) -> None:
    sizes = sizes or [10 + 7 * rank for rank in range(transport.size)]
    parts = [payload(seed + rank, size) for rank, size in enumerate(sizes)]
    same(
        transport.scatter(parts if transport.rank == 0 else None, sizes[transport.rank]),
        parts[transport.rank],
    )


def check_gather(transport: Transport, sizes: list[int] | None = None, seed: int = 4) -> None:
    sizes = sizes or [10 + 7 * rank for rank in range(transport.size)]
    parts = [payload(seed + rank, size) for rank, size in enumerate(sizes)]
    found = transport.gather(parts[transport.rank], sizes)
    assert (found is None) == (transport.rank != 0)
    for part, right in zip(found or [], parts, strict=transport.rank == 0):
        same(part, right)


def check_all_to_all(transport: Transport, sizes: np.ndarray | None = None, seed: int = 5) -> None:
    """Every rank has something else, of another size, for every rank."""
    count, rank = transport.size, transport.rank
    sizes = 10 + np.arange(count * count).reshape(count, count) if sizes is None else sizes

    def between(sender: int, receiver: int) -> np.ndarray:
        return payload(seed + sender * count + receiver, int(sizes[sender, receiver]))

    mine = {other: between(rank, other) for other in range(count) if sizes[rank, other]}
    theirs = {sender: int(size) for sender, size in enumerate(sizes[:, rank]) if size}
    found = transport.all_to_all(mine, theirs, int(sizes.sum() - np.trace(sizes)))
    assert found.keys() == theirs.keys() and found.get(rank) is mine.get(rank)
    for sender, part in found.items():
        same(part, between(sender, rank))


def check_some_ranks_have_nothing(transport: Transport) -> None:
    for sizes in (
        [0] * transport.size,
        [5 * (rank % 2) for rank in range(transport.size)],
        [5 * ((rank + 1) % 2) for rank in range(transport.size)],
    ):
        check_scatter(transport, sizes)
        check_gather(transport, sizes)
        check_all_to_all(transport, np.outer(sizes, np.ones(transport.size, np.int64)))
        check_all_to_all(transport, np.outer(np.ones(transport.size, np.int64), sizes))


def check_empty_messages(transport: Transport) -> None:
    transport.broadcast(np.zeros(0, np.uint8))
    same(transport.maximum(np.zeros(0)), np.zeros(0))
    summed = transport.sum_int64(np.zeros(0, np.int64))
    assert (summed is None) == (transport.rank != 0)


def check_maximum(transport: Transport) -> None:
    values = np.array([transport.rank, -transport.rank - 1.0, 2.0**-1074 * transport.rank, 0.1])
    last = transport.size - 1
    same(transport.maximum(values), np.array([last, -1.0, 2.0**-1074 * last, 0.1]))
    same(values, np.array([transport.rank, -transport.rank - 1.0, 2.0**-1074 * transport.rank, 0.1]))


def check_maximum_of_special_values(transport: Transport) -> None:
    last = transport.rank == transport.size - 1
    first = transport.rank == 0
    alone = transport.size == 1
    values = np.array(
        [
            np.inf if last else 1.0,
            -np.inf,
            0.0 if last else -0.0,  # 0.0 wins over -0.0
            -0.0,
            -np.inf if last and not alone else -3.0,
            -np.nan if first else np.inf,  # a NaN wins over all, and comes out as the one NaN
            np.nan if last else -np.inf,
        ]
    )
    same(transport.maximum(values), np.array([np.inf, -np.inf, 0.0, -0.0, -3.0, np.nan, np.nan]))


def check_sum_is_exact_near_the_end_of_the_range(transport: Transport) -> None:
    share = 2**62 // transport.size
    values = np.array([share + transport.rank, -share - transport.rank, 1, 2**53 + 1 if transport.rank == 0 else 0])
    extra = transport.size * (transport.size - 1) // 2
    total = transport.size * share + extra
    found = transport.sum_int64(values.astype(np.int64))
    assert (found is None) == (transport.rank != 0)
    if found is not None:
        same(found, np.array([total, -total, transport.size, 2**53 + 1], np.int64))


def check_barrier(transport: Transport) -> None:
    for _ in range(3):
        transport.barrier()


def check_counters(transport: Transport) -> None:
    others = transport.size - 1
    transport.counter.take("control"), transport.counter.take("data")
    with transport.channel("data"):
        check_broadcast(transport, 100)
        check_gather(transport, [7] * transport.size)
        check_all_to_all(transport, np.full((transport.size, transport.size), 3))
        with transport.channel("control"):
            transport.maximum(np.zeros(3))
        transport.sum_int64(np.zeros(4, np.int64))
    check_scatter(transport, [9] * transport.size)
    transport.barrier()
    exchanged = 3 * transport.size * others
    assert transport.counter.take("data") == (100 * others, 7 * others + exchanged + sum_bytes(transport, 4))
    down, up = transport.counter.take("control")
    assert up == 24 * others
    assert down == (9 * others if transport.rank == 0 else 9)  # the others know their own part only
    assert transport.counter.take("data") == transport.counter.take("control") == (0, 0)


def sum_bytes(transport: Transport, count: int) -> int:
    """The bytes that a sum of so many int64 moves: gloo's ring sends rank 0 the parts of the others at last."""
    moved = count * (transport.size - 1)
    if transport.name == "torch":
        moved += count - min(2 * -(-count // (2 * transport.size)), count)
    return 8 * moved


def check_large_messages(transport: Transport) -> None:
    check_broadcast(transport, LARGE)
    check_scatter(transport, [LARGE] * transport.size)
    check_gather(transport, [LARGE] * transport.size)
    check_all_to_all(transport, np.full((transport.size, transport.size), LARGE // 4))
    values = payload(9, LARGE).view(np.int64) >> 8
    found = transport.sum_int64(values.copy())
    if found is not None:
        same(found, values * transport.size)


def check_a_random_sequence(transport: Transport) -> None:
    """200 calls of random kinds and sizes: nothing gets out of step, and everything is counted."""
    random = np.random.default_rng(7)
    transport.counter.take("control")
    moved = np.zeros(2, np.int64)
    for step in range(200):
        kind = random.integers(7)
        sizes = [int(size) for size in random.integers(0, 3000, transport.size) * random.integers(0, 2, transport.size)]
        own = sizes[transport.rank]
        if kind == 0:
            check_broadcast(transport, sizes[0], step)
            moved[0] += sizes[0] * (transport.size - 1)
        elif kind == 1:
            check_scatter(transport, sizes, step)
            moved[0] += sum(sizes[1:]) if transport.rank == 0 else own
        elif kind == 2:
            check_gather(transport, sizes, step)
            moved[1] += sum(sizes[1:])
        elif kind == 3:
            values = random.standard_normal((transport.size, sizes[0]))
            same(transport.maximum(values[transport.rank]), values.max(0))
            moved[1] += 8 * sizes[0] * (transport.size - 1)
        elif kind == 4:
            numbers = random.integers(-(2**59), 2**59, (transport.size, sizes[0]))
            found = transport.sum_int64(numbers[transport.rank].copy())
            if found is not None:
                same(found, numbers.sum(0))
            moved[1] += sum_bytes(transport, sizes[0])
        elif kind == 5:
            matrix = random.integers(0, 3000, (transport.size, transport.size)) * random.integers(0, 2, transport.size)
            check_all_to_all(transport, matrix, step)
            moved[1] += matrix.sum() - np.trace(matrix)
        else:
            transport.barrier()
    assert transport.counter.take("control") == tuple(moved)


CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): check for name, check in sorted(globals().items()) if name.startswith("check_")
}
