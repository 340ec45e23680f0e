"""CRC-32 of bytes in a row whose parts have known checksums, without going over them again.

The checksum of A and then B is that of A times x^(8 n), n being the bytes of B, plus (exclusive or) that of B: products
of polynomials over one bit, modulo the CRC's. A polynomial is a number whose highest bit is the coefficient of x^0.
"""

import os
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from zlib_ng import zlib_ng as zlib

_ONE, _MODULUS = 1 << 31, 0xEDB88320
_CHUNK = 1 << 24

Polynomials = TypeVar("Polynomials", int, np.ndarray)


class Part(NamedTuple):
    """Bytes of a file with a known checksum: the position of the first, how many, and their CRC-32."""

    start: int
    bytes: int
    crc32: int


def crc32(array: np.ndarray, start: int = 0) -> int:
    """CRC-32 of the bytes in C order, continued from `start`."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return zlib.crc32(flat.view(np.uint8).data if flat.size else b"", start)


def crc32_combine(first: Polynomials, second: Polynomials, length: int) -> Polynomials:
    """Checksums of bytes with those of `first`, then `length` bytes with those of `second`; as zlib's function.

    Args:
        first, second: numbers, or arrays of uint32 [m].

    >>> crc32_combine(zlib.crc32(b"one"), zlib.crc32(b" row"), 4) == zlib.crc32(b"one row")
    True
    """
    combined: Polynomials = _product(_over(length), first) ^ second
    return combined


def crc32_repeat(checksum: int, length: int, times: int) -> int:
    """Checksum of `length` bytes that come so many times; `checksum` is that of them once.

    >>> crc32_repeat(zlib.crc32(b"row"), 3, 7) == zlib.crc32(7 * b"row")
    True
    """
    repeated = 0
    while times:
        if times & 1:
            repeated = crc32_combine(repeated, checksum, length)
        checksum, length = crc32_combine(checksum, checksum, length), 2 * length
        times >>= 1
    return repeated


def crc32_of_rows(array: np.ndarray, starts: np.ndarray | None = None) -> np.ndarray:
    """Checksums uint32 [m] of the rows of an array [m, ...], each continued from that of `starts` [m]."""
    begun = np.zeros(len(array), np.uint32) if starts is None else starts
    if array.size == 0:
        return begun
    rows = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
    return np.array([zlib.crc32(row.data, start) for row, start in zip(rows, begun.tolist(), strict=True)], np.uint32)


def crc32_join(rows: np.ndarray, length: int) -> int:
    """Checksum of rows of `length` bytes one after the other, of theirs [m]."""
    joined = 0
    for row in rows.tolist():
        joined = crc32_combine(joined, row, length)
    return joined


def crc32_of_file(descriptor: int, start: int, known: Iterable[Part] = ()) -> tuple[int, int]:
    """Number and CRC-32 of the bytes of a file from a position on; parts that are known are not read."""
    position, checksum = start, 0
    for part in sorted(known):
        assert position <= part.start, "parts of a file overlap"
        position, checksum = _read(descriptor, position, part.start, checksum)
        position, checksum = position + part.bytes, crc32_combine(checksum, part.crc32, part.bytes)
    position, checksum = _read(descriptor, position, None, checksum)
    return position - start, checksum


def _read(descriptor: int, position: int, end: int | None, checksum: int) -> tuple[int, int]:
    """Carry on a checksum over the bytes of a file up to a position, or to its end; where that is, and the checksum."""
    while chunk := os.pread(descriptor, _CHUNK if end is None else min(_CHUNK, end - position), position):
        position, checksum = position + len(chunk), zlib.crc32(chunk, checksum)
    return position, checksum


@lru_cache(maxsize=1 << 12)
def _over(length: int) -> int:
    """x^(8 length)."""
    product, power = _ONE, _ONE >> 8
    while length:
        if length & 1:
            product = _product(power, product)
        power = _product(power, power)
        length >>= 1
    return product


def _product(one: int, other: Polynomials) -> Polynomials:
    """The product modulo the CRC's polynomial, from the coefficient of x^0 of `one` on."""
    product = other & 0
    while one:
        if one & _ONE:
            product = product ^ other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (other & 1) * _MODULUS
    return product
