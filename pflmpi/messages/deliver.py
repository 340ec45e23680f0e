"""Moves rows from the ranks where they are stored to those that need them, each at most once to a rank."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from pflmpi import tree
from pflmpi.messages.kinds import with_rows
from pflmpi.messages.packing import NOTHING, pack, unpack
from pflmpi.messages.traffic import Traffic
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree


def deliver(
    transport: Transport,
    wanted: Sequence[np.ndarray],
    home: np.ndarray,
    rows: Callable[[np.ndarray], Tree],
    like: Tree,
    down: bool = True,
) -> Tree:
    """Returns the rows [U, ...] that this rank wants, in the order of their numbers; they must not be modified.

    Args:
        wanted: of each rank, the ascending numbers of the rows that it wants.
        home: [n] the rank where each row is stored.
        rows: returns the rows [m, ...] of ascending numbers that are stored here.
        like: the template of one row.
        down: whether the rows are part of the downlink, not of the uplink.
    """
    here, target, numbers = transport.rank, _targets(wanted), np.concatenate(wanted)
    source, size = home[numbers], tree.num_bytes(like)
    requested = _group_by_rank(numbers[source == here], target[source == here])
    arriving = _group_by_rank(wanted[here], source[target == here])
    packed: dict[bytes, np.ndarray] = {}  # ranks that want the same rows share the memory
    sending: dict[int, np.ndarray] = {}
    for rank, ids in requested.items():
        if rank != here:
            if ids.tobytes() not in packed:
                packed[ids.tobytes()] = pack(rows(ids), transport.host_buffer)
            sending[rank] = packed[ids.tobytes()]
    sizes = {rank: size * len(ids) for rank, ids in arriving.items() if rank != here}
    received = {}
    if moved := size * int(np.count_nonzero(source != target)):
        received = transport.exchange(sending, sizes, moved, down)
    if [*arriving] == [here]:
        return rows(wanted[here])
    parts = (
        (ids, rows(ids) if rank == here else unpack(received.pop(rank, NOTHING), with_rows(like, len(ids))))
        for rank, ids in arriving.items()
    )
    return merge_rows(wanted[here], like, parts)


def merge_rows(numbers: np.ndarray, like: Tree, parts: Iterable[tuple[np.ndarray, Tree]]) -> Tree:
    """Merges parts, each ascending numbers and their rows, into the rows [m, ...] of all `numbers` (ascending)."""
    result = tree.map(lambda leaf: torch.empty(len(numbers), *leaf.shape, dtype=leaf.dtype), like)
    for part_numbers, rows in parts:
        positions = torch.from_numpy(np.searchsorted(numbers, part_numbers))
        tree.map(lambda all, part, positions=positions: all.index_copy_(0, positions, part), result, rows)
    return result


def delivery_traffic(wanted: Sequence[np.ndarray], home: np.ndarray, like: Tree, down: bool = True) -> Traffic:
    """Returns the bytes of the exchange of `deliver`."""
    target, ranks, size = _targets(wanted), len(wanted), tree.num_bytes(like)
    source = home[np.concatenate(wanted)]
    moves = source != target
    sent = size * np.bincount(source[moves], minlength=ranks)
    received = size * np.bincount(target[moves], minlength=ranks)
    return Traffic(sent, received, down)


def _targets(wanted: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the rank that wants each row, for the rows of all ranks, rank by rank."""
    return np.repeat(np.arange(len(wanted)), [len(numbers) for numbers in wanted])


def _group_by_rank(numbers: np.ndarray, ranks: np.ndarray) -> dict[int, np.ndarray]:
    """Groups ascending numbers by their rank; ranks without any are left out."""
    order = np.argsort(ranks, kind="stable")
    distinct, starts = np.unique(ranks[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(numbers[order], starts[1:]), strict=True)) if len(distinct) else {}
