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

CLIENTS_AT_ONCE = 64


def digest_of_blocks(server: Arrays, blocks: Iterable[ClientRows]) -> str:
    """Digest of a state in memory.

    Args:
        server: arrays by path.
        blocks: each with higher ids than the one before; for each cohort ids [m], in any order, and by path rows
            [m, ...].

    >>> digest_of_blocks({"step": np.array(3)}, [])[:16]
    'b9732152f3f51d95'
    """
    content = hashlib.sha256()
    for path in sorted(server):
        _update(content, f"server {path}", server[path])
    for block in blocks:
        rows = [
            (int(client), cohort, row) for cohort, (ids, _) in block.items() for row, client in enumerate(ids.tolist())
        ]
        for client, cohort, row in sorted(rows):
            leaves = block[cohort][1]
            for path in sorted(leaves):
                _update(content, f"client {client} {path}", np.asarray(leaves[path][row]))
    return content.hexdigest()


def _update(content: "hashlib._Hash", name: str, array: np.ndarray) -> None:
    shape = "x".join(map(str, array.shape)) or "scalar"
    content.update(f"{name} {array.dtype.name} {shape}\n".encode())
    content.update(np.asarray(array, array.dtype.newbyteorder("<"), order="C").tobytes())
