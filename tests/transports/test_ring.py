"""Bytes of gloo's sum, against a ring that is walked through."""

import pytest

from pflmpi.transports import ring


def walked(size: int, ranks: int) -> int:
    """What all ranks send for one piece: segment after segment to the rank before, then what each has summed."""
    segment = -(-size // (2 * ranks * 8)) * 8
    count, total = 2 * ranks, 0
    for rank in range(ranks):
        starts = [(2 * (rank + 1) + step) % count * segment for step in range(count - 2)]
        total += sum(max(min(segment, size - start), 0) for start in starts)
        if rank != 0:
            total += max(min(2 * segment, size - 2 * rank * segment), 0)
    return total


@pytest.mark.parametrize("ranks", [2, 3, 4, 21])
@pytest.mark.parametrize("size", [8, 80, 8000, 2**20 - 8, 4 * 2**20])
def test_bytes_of_a_piece_are_those_of_the_walk(size: int, ranks: int) -> None:
    assert size <= ring.piece(ranks)
    assert ring.sum_bytes(size, ranks) == walked(size, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_large_buffer_is_the_sum_of_its_pieces(ranks: int) -> None:
    most = ring.piece(ranks)
    assert ring.sum_bytes(3 * most + 88, ranks) == 3 * walked(most, ranks) + walked(88, ranks)
    assert ring.sum_bytes(3 * most, ranks) == 3 * most * (ranks - 1) * (ranks + 1) // ranks


def test_one_rank_sends_nothing() -> None:
    assert ring.sum_bytes(10**9 // 8 * 8, 1) == 0
