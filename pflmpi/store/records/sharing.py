"""Which ranks share a shard, so that the number of files does not grow with the ranks."""

import math
from collections.abc import Sequence

import numpy as np

from pflmpi.store.layout import Layout
from pflmpi.store.names import shard_name
from pflmpi.store.round_file import Templates
from pflmpi.store.shard import ID_BYTES

OWN = 1 << 24  # bytes of rows above which a rank writes a shard of its own, at once and by itself
_SHARED = 1 << 26  # bytes of rows in a shard of several ranks, at most


def row_bytes(templates: Templates, cohort: np.ndarray) -> np.ndarray:
    """Bytes [N] of the row of each client; 0 where clients keep nothing.

    Args:
        templates: of all cohorts, in order; see `round_file.write_round`.
        cohort: [N] the cohort of each client.
    """
    sizes = [
        sum((math.prod(shape) * dtype.itemsize for shape, dtype in leaves.values()), ID_BYTES) if leaves else 0
        for leaves in templates.values()
    ]
    found: np.ndarray = np.array(sizes, np.int64)[cohort]
    return found


def first_ranks(sizes: Sequence[int]) -> np.ndarray:
    """The first rank [R] of those with which each rank shares a shard.

    Args:
        sizes: bytes of each rank's rows, as if each client had its own.

    >>> first_ranks([5, 0, OWN + 1, 7]).tolist()
    [0, 1, 2, 0]
    """
    first, shared, together = np.arange(len(sizes)), -1, 0
    for rank, size in enumerate(sizes):
        if not 0 < size <= OWN:
            continue
        if shared < 0 or together + size > _SHARED:
            shared, together = rank, 0
        first[rank], together = shared, together + size
    return first


def shared(
    layout: Layout, round: int, rows: Sequence[np.ndarray], row_bytes: np.ndarray, cohort: np.ndarray
) -> tuple[Layout, dict[str, list[int]]]:
    """Layout after a checkpoint, and whose records hold the rows of a shard, by its name; the others are written.

    Args:
        layout: before.
        rows: for each rank, the ids that changed.
        row_bytes: [N] of each client.
        cohort: [N] the cohort of each client.
    """
    sizes = [int(row_bytes[clients].sum()) if len(clients) else 0 for clients in rows]
    firsts = first_ranks(sizes).tolist()
    groups: dict[int, list[int]] = {}
    for rank, clients in enumerate(rows):
        if len(clients):  # of many ranks few have any
            groups.setdefault(firsts[rank], []).append(rank)
    together = [np.empty(0, np.int64)] * len(rows)
    for first, ranks in groups.items():
        together[first] = np.sort(np.concatenate([rows[rank] for rank in ranks]))
    recorded = {shard_name(round, first): ranks for first, ranks in groups.items() if 0 < sizes[first] <= OWN}
    return layout.updated(round, together, cohort), recorded
