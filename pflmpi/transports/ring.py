"""How gloo sums buffers on rank 0: around a ring, then each rank sends rank 0 the part that it has summed.

A buffer is cut into segments, two per rank; each rank forwards all but its own two to the rank before it. Where
segments would exceed 1 MiB, gloo (up to torch 2.15 at least) cuts more of them but still holds back only two:
at 2 ranks that moves 2.5 times the buffer instead of 1.5 and takes half as long again. So buffers are summed in
pieces of two segments per rank.

No torch here: the schedule counts these bytes without it.
"""

from math import ceil

_SEGMENT = 2**20  # bytes, of the largest segment
_SEGMENTS = 2  # per rank
_ITEM = 8  # bytes of an int64


def piece(ranks: int) -> int:
    """Bytes that are summed at once."""
    return _SEGMENTS * ranks * _SEGMENT


def sum_bytes(size: int, ranks: int) -> int:
    """Bytes that ranks send each other to sum buffers of `size` bytes of int64 values.

    >>> sum_bytes(2400, ranks=3), sum_bytes(2400, ranks=1)
    (6400, 0)
    """
    whole, rest = divmod(size, piece(ranks))
    return whole * _piece_bytes(piece(ranks), ranks) + _piece_bytes(rest, ranks)


def _piece_bytes(size: int, ranks: int) -> int:
    segment = ceil(size / (_SEGMENTS * ranks) / _ITEM) * _ITEM
    return (ranks - 1) * size + size - min(_SEGMENTS * segment, size)
