"""One SHA-256 over the state of a round, independent of how the run was laid out.

It covers these bytes: for each array of the server in sorted order of the paths, and then for each client that keeps
anything, in ascending order, for each of its arrays in sorted order of the paths,

    a line of ASCII, ended by a newline:    server <path> <dtype> <shape>    or    client <id> <path> <dtype> <shape>
    the elements in C order, little-endian; a bool is one byte

where dtype is NumPy's name (float32) and shape the extents joined by "x" (64x32x5x5), "scalar" if there are none. The
shape of a client's array excludes the client axis. Cohorts, shards and ranks leave no trace.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from pflmpi.store.shard import Arrays, ClientRows

_AT_ONCE = 1 << 24  # bytes of clients' rows in memory
_MOST_AT_ONCE = 1 << 15  # clients


def clients_at_once(row_bytes: int) -> int:
    """Returns how many clients of so many bytes to read for a block of `digest_of_blocks`.

    >>> clients_at_once(360), clients_at_once(1 << 20), clients_at_once(1 << 30)
    (32768, 16, 1)
    """
    return min(max(_AT_ONCE // max(row_bytes, 1), 1), _MOST_AT_ONCE)


def digest_of_blocks(server: Arrays, blocks: Iterable[ClientRows]) -> str:
    """Computes the digest of a state.

    Args:
        server: arrays by path.
        blocks: each with higher ids than the one before: for each cohort the ids [m], in any order, and the rows
            [m, ...] by path.

    >>> digest_of_blocks({"step": np.array(3)}, [])[:16]
    'b9732152f3f51d95'
    """
    content = hashlib.sha256()
    for path in sorted(server):
        array = np.asarray(server[path])
        content.update(b"server " + _header(path, array.dtype, array.shape) + _bytes(array))
    for block in blocks:
        encoded = {
            cohort: [_encode_rows(path, leaves[path]) for path in sorted(leaves)]
            for cohort, (_, leaves) in block.items()
        }
        rows = [(client, cohort, row) for cohort, (ids, _) in block.items() for row, client in enumerate(ids.tolist())]
        parts: list[bytes] = []
        for client, cohort, row in sorted(rows):
            for header, values, size in encoded[cohort]:
                parts += (b"client %d " % client, header, values[row * size : (row + 1) * size])
        content.update(b"".join(parts))
    return content.hexdigest()


def _encode_rows(path: str, array: np.ndarray) -> tuple[bytes, bytes, int]:
    """Returns, of an array [m, ...] of clients, the line after the id, the bytes of all rows, and those per row."""
    values = _bytes(array)
    return _header(path, array.dtype, array.shape[1:]), values, len(values) // max(len(array), 1)


def _header(path: str, dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{path} {dtype.name} {'x'.join(map(str, shape)) or 'scalar'}\n".encode()


def _bytes(array: np.ndarray) -> bytes:
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C").tobytes()
