"""CRC-32 of bytes that are repeated, without going over them again.

The checksum of A and then B is that of A, carried on over as many zero bytes as B has, plus (exclusive or) that of B.
To carry on is linear over bits, so it is known from what becomes of each of the 32 bits.
"""

import zlib
from functools import cache

import numpy as np

_BITS = range(32)


def followed(first: np.ndarray, second: int, length: int) -> np.ndarray:
    """Checksums uint32, of bytes with the checksums `first`, each followed by `length` bytes with the one `second`.

    >>> start = np.array([zlib.crc32(b"one"), zlib.crc32(b"other")], np.uint32)
    >>> followed(start, zlib.crc32(b" row"), 4).tolist() == [zlib.crc32(b"one row"), zlib.crc32(b"other row")]
    True
    """
    return _carried(first, _over_zeros(length)) ^ np.uint32(second)


def repeated(checksum: int, length: int, times: int) -> int:
    """Checksum of `length` bytes that come so many times, at least once; `checksum` is that of them once.

    >>> repeated(zlib.crc32(b"row"), 3, 7) == zlib.crc32(7 * b"row")
    True
    """
    found, there = 0, 0
    once, size = checksum, length
    while times:
        if times & 1:
            found = int(followed(np.array([found], np.uint32), once, size)[0]) if there else once
            there += size
        once, size = int(followed(np.array([once], np.uint32), once, size)[0]), 2 * size
        times >>= 1
    return found


def _carried(checksums: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Checksums after a linear step; `images` [32] is what becomes of each bit."""
    found = np.zeros_like(checksums)
    for bit in _BITS:
        found ^= np.where(checksums >> np.uint32(bit) & np.uint32(1), images[bit], np.uint32(0))
    return found


@cache
def _over_zeros(length: int) -> np.ndarray:
    """What becomes [32] of each bit over so many zero bytes."""
    if length == 0:
        return np.array([1 << bit for bit in _BITS], np.uint32)
    if length == 1:
        return np.array([zlib.crc32(b"\0", 1 << bit) ^ zlib.crc32(b"\0") for bit in _BITS], np.uint32)
    half = _over_zeros(length // 2)
    whole = _carried(half, half)
    return _carried(whole, _over_zeros(1)) if length % 2 else whole
