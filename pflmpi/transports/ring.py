"""How gloo sums buffers on rank 0: around a ring, then each rank sends rank 0 the part that it has summed.

A buffer is cut into segments, two per rank; each rank forwards all but its own two to the rank before it. Where
segments would exceed `SEGMENT`, gloo (up to torch 2.15 at least) cuts more of them but still holds back only two:
at 2 ranks that moves 2.5 times the buffer instead of 1.5 and takes half as long again. So buffers are summed in
pieces of two segments per rank.

No torch here: the schedule counts these bytes without it.
"""

from math import ceil

SEGMENT = 2**20  # bytes
SEGMENTS = 2  # per rank
_ITEM = 8  # bytes of an int64


def piece(ranks: int) -> int:
    """Bytes that are summed at once."""
    return SEGMENTS * ranks * SEGMENT


def segment(size: int, ranks: int) -> int:
    """Bytes of a segment of a piece of `size` bytes."""
    return ceil(size / (SEGMENTS * ranks) / _ITEM) * _ITEM


def sum_bytes(size: int, ranks: int) -> int:
    """Bytes that ranks send each other to sum buffers of `size` bytes of int64 values.

    >>> sum_bytes(2400, ranks=3), sum_bytes(2400, ranks=1)
    (6400, 0)
    """
    whole, rest = divmod(size, piece(ranks))
    return whole * _piece_bytes(piece(ranks), ranks) + _piece_bytes(rest, ranks)


def _piece_bytes(size: int, ranks: int) -> int:
    return (ranks - 1) * size + size - min(SEGMENTS * segment(size, ranks), size)
