"""A record: what one rank has of a checkpoint, packed, with checksums.

    head           magic, round, bytes of the description and of the arrays, their CRC-32, and that of the head
    description    JSON: what is known of the arrays, and what else there is to say
    arrays         their bytes, each from a multiple of 8 on

An array that has several names is stored once, and so is the row of one whose rows are one in memory.
"""

import json
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from zlib_ng import zlib_ng as zlib

from pflmpi.store.once.leaf import is_repeated
from pflmpi.store.shard import Arrays

_MAGIC = b"pflmpi 1"
_HEAD = struct.Struct("<8sqQQII")
_CHECKSUM = struct.Struct("<Q")  # of the head
_HEAD_BYTES = _HEAD.size + _CHECKSUM.size
_ALIGNED = 8
_AT_ONCE = 512  # buffers in one call; systems allow 1024
_LONGEST = 1 << 30  # bytes read in one call; systems allow 2 GiB


@dataclass(frozen=True, eq=False)
class Record:
    """What a rank has of a checkpoint.

    Attributes:
        round: its number.
        about: what else there is to say, as JSON can.
        arrays: by name.
    """

    round: int
    about: Mapping[str, Any]
    arrays: Arrays


class Place(NamedTuple):
    """Where a record is: its round, its first byte and the one after its last."""

    round: int
    start: int
    end: int


def pack(record: Record) -> list[memoryview]:
    """The buffers of a record; its arrays are not copied."""
    table, buffers, length, checksum = list[list[Any]](), list[memoryview](), 0, 0
    numbers, seen = dict[str, int](), dict[int, int]()
    for name, array in record.arrays.items():
        if id(array) not in seen:
            seen[id(array)] = len(table)
            repeated = array.ndim > 0 and is_repeated(array)
            table.append([array.dtype.str, list(array.shape), repeated, length])
            for part in _padded(_bytes(array[:1] if repeated else array)):
                buffers.append(part)
                length, checksum = length + part.nbytes, zlib.crc32(part, checksum)
        numbers[name] = seen[id(array)]
    about = json.dumps({"about": record.about, "arrays": table, "names": numbers}).encode()
    about += b" " * (-len(about) % _ALIGNED)
    head = _HEAD.pack(_MAGIC, record.round, len(about), length, zlib.crc32(about), checksum)
    return [memoryview(head + _CHECKSUM.pack(zlib.crc32(head)) + about), *buffers]


def write(descriptor: int, buffers: Iterable[memoryview], position: int) -> int:
    """Write buffers one after the other from a position on; the position after them. Others compute meanwhile."""
    waiting = deque(buffers)
    while waiting:
        written = os.pwritev(descriptor, list(islice(waiting, _AT_ONCE)), position)
        position += written
        while waiting and written >= waiting[0].nbytes:
            written -= waiting.popleft().nbytes
        if written:
            waiting[0] = waiting[0][written:]
    return position


def places(descriptor: int) -> list[Place]:
    """Where the records of a file are, but for one cut short, the last, and those whose heads are damaged."""
    found, position, size = list[Place](), 0, os.fstat(descriptor).st_size
    while 0 <= position < size:
        head = _head(descriptor, position)
        if head is None:
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
                position = content.find(_MAGIC, position + 1)
            continue
        _, round, about, arrays, _, _ = head
        end = position + _HEAD_BYTES + about + arrays
        if end > size:
            break
        found.append(Place(round, position, end))
        position = end
    return found


def read(descriptor: int, place: Place) -> Record | None:
    """A record; None if its bytes are not those that were written."""
    head = _head(descriptor, place.start)
    content = _read(descriptor, place.start + _HEAD_BYTES, place.end)
    if head is None or len(content) != place.end - place.start - _HEAD_BYTES:
        return None
    _, round, size, _, described, checksum = head
    about, body = content[:size], content[size:]
    if zlib.crc32(about) != described or zlib.crc32(body) != checksum:
        return None
    said = json.loads(bytes(about))
    arrays = [_array(body, *entry) for entry in said["arrays"]]
    return Record(round, said["about"], {name: arrays[number] for name, number in said["names"].items()})


def _head(descriptor: int, position: int) -> Sequence[Any] | None:
    head = os.pread(descriptor, _HEAD_BYTES, position)
    if len(head) < _HEAD_BYTES or not head.startswith(_MAGIC):
        return None
    if _CHECKSUM.unpack_from(head, _HEAD.size)[0] != zlib.crc32(head[: _HEAD.size]):
        return None
    return _HEAD.unpack_from(head)


def _read(descriptor: int, start: int, end: int) -> memoryview:
    """The bytes of a file between two positions; fewer where it ends before."""
    content, there = np.empty(end - start, np.uint8), 0  # NumPy's are aligned
    while there < len(content):
        got = os.preadv(descriptor, [content[there : there + _LONGEST].data], start + there)
        if got == 0:
            break
        there += got
    return content[:there].data


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _padded(content: memoryview) -> list[memoryview]:
    """The content, and zeros up to a multiple of 8."""
    rest = -content.nbytes % _ALIGNED
    return [part for part in (content, memoryview(bytes(rest))) if part.nbytes]


def _array(body: memoryview, kind: str, shape: list[int], repeated: bool, start: int) -> np.ndarray:
    stored = [1, *shape[1:]] if repeated else shape
    dtype = np.dtype(kind)
    count = int(np.prod(stored, dtype=np.int64))
    found = np.frombuffer(body, dtype, count, start).reshape(stored) if count else np.empty(stored, dtype)
    return np.broadcast_to(found, shape) if repeated else found
