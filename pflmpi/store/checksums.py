"""CRC-32 of arrays, of their rows, and of files of which some parts are known."""

import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from zlib_ng import zlib_ng as zlib

_CHUNK = 1 << 24


class Part(NamedTuple):
    """Bytes of a file with a known checksum: the position of the first, how many, and their CRC-32."""

    start: int
    bytes: int
    crc32: int


def crc32(array: np.ndarray, start: int = 0) -> int:
    """CRC-32 of the bytes in C order, continued from `start`."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return zlib.crc32(flat.view(np.uint8).data if flat.size else b"", start)


def crc32_of_rows(array: np.ndarray, starts: np.ndarray | None = None) -> np.ndarray:
    """Checksums uint32 [m] of the rows of an array [m, ...], each continued from that of `starts` [m]."""
    starts = np.zeros(len(array), np.uint32) if starts is None else starts
    if array.size == 0:
        return starts
    rows = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
    return np.array([zlib.crc32(row.data, start) for row, start in zip(rows, starts.tolist(), strict=True)], np.uint32)


def crc32_of_file(descriptor: int, start: int, known: Iterable[Part] = ()) -> tuple[int, int]:
    """Returns number and CRC-32 of the bytes of a file from a position on; does not read the known parts."""
    position, checksum = start, 0
    for part in sorted(known):
        assert position <= part.start, "parts of a file overlap"
        position, checksum = _crc32_until(descriptor, position, part.start, checksum)
        position, checksum = position + part.bytes, zlib.crc32_combine(checksum, part.crc32, part.bytes)
    position, checksum = _crc32_until(descriptor, position, None, checksum)
    return position - start, checksum


def _crc32_until(descriptor: int, position: int, end: int | None, checksum: int) -> tuple[int, int]:
    """Continues a checksum up to a position, or to the end of the file; returns that position and the checksum."""
    while chunk := os.pread(descriptor, _CHUNK if end is None else min(_CHUNK, end - position), position):
        position, checksum = position + len(chunk), zlib.crc32(chunk, checksum)
    return position, checksum
