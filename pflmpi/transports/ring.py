"""How gloo sums buffers on rank 0: around a ring, then each rank sends rank 0 the part that it has summed.

A buffer is cut into segments, two for each rank; each rank passes on all but its own two to the rank before it. Where
segments would be larger than `SEGMENT`, gloo (up to torch 2.15 at least) cuts more of them and still keeps only two
back: at 2 ranks that moves 2.5 times the buffer instead of 1.5, and takes half as long again. So buffers are summed in
pieces that have two segments for each rank.
"""

from math import ceil

SEGMENT = 2**20  # bytes
SEGMENTS = 2  # of each rank
_ITEM = 8  # bytes of an int64


def piece(ranks: int) -> int:
    """Return how many bytes are summed at once."""
    return SEGMENTS * ranks * SEGMENT


def segment(size: int, ranks: int) -> int:
    """Return the bytes of a segment of a piece of `size` bytes."""
    return ceil(size / (SEGMENTS * ranks) / _ITEM) * _ITEM


def sum_bytes(size: int, ranks: int) -> int:
    """Return the bytes that ranks send each other to sum buffers of `size` bytes of int64 values.

    >>> sum_bytes(2400, ranks=3), sum_bytes(2400, ranks=1)
    (6400, 0)
    """
    whole, rest = divmod(size, piece(ranks))
    return whole * _piece_bytes(piece(ranks), ranks) + _piece_bytes(rest, ranks)


def _piece_bytes(size: int, ranks: int) -> int:
    return (ranks - 1) * size + size - min(SEGMENTS * segment(size, ranks), size)
