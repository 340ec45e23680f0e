"""Moves rows from the ranks where they live to those that want them, each at most once to a rank."""

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
    """The rows [U, ...] that this rank wants, in the order of their numbers; only to be read.

    Args:
        wanted: of each rank, the ascending numbers of the rows that it wants.
        home: [n] the rank where each row lives.
        rows: from ascending numbers of rows that live here, these rows [m, ...].
        like: the template of one row.
        down: whether it is on the way to clients, not from them.
    """
    here, target, numbers = transport.rank, _targets(wanted), np.concatenate(wanted)
    source, size = home[numbers], tree.num_bytes(like)
    sent = _by_rank(numbers[source == here], target[source == here])
    arriving = _by_rank(wanted[here], source[target == here])
    packed: dict[bytes, np.ndarray] = {}  # ranks that want the same share the memory
    for ids in (ids for rank, ids in sent.items() if rank != here):
        if ids.tobytes() not in packed:
            packed[ids.tobytes()] = pack(rows(ids), transport.host_buffer)
    sending = {rank: packed[ids.tobytes()] for rank, ids in sent.items() if rank != here}
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
    """Rows [m, ...] by their ascending numbers, from parts that have the rows of some of these numbers each."""
    result = tree.map(lambda leaf: torch.empty(len(numbers), *leaf.shape, dtype=leaf.dtype), like)
    for some, rows in parts:
        places = torch.from_numpy(np.searchsorted(numbers, some))
        tree.map(lambda all, part, at=places: all.index_copy_(0, at, part), result, rows)
    return result


def delivery(wanted: Sequence[np.ndarray], home: np.ndarray, like: Tree, down: bool = True) -> Traffic:
    """The exchange of `deliver`."""
    target, ranks, size = _targets(wanted), len(wanted), tree.num_bytes(like)
    source = home[np.concatenate(wanted)]
    away = source != target
    sent, received = (size * np.bincount(ends[away], minlength=ranks) for ends in (source, target))
    return Traffic(sent, received, down)


def _targets(wanted: Sequence[np.ndarray]) -> np.ndarray:
    """The rank that wants each of the rows that all ranks want, rank by rank."""
    return np.repeat(np.arange(len(wanted)), [len(numbers) for numbers in wanted])


def _by_rank(numbers: np.ndarray, ranks: np.ndarray) -> dict[int, np.ndarray]:
    """Ascending numbers by their rank; no rank without any."""
    order = np.argsort(ranks, kind="stable")
    distinct, starts = np.unique(ranks[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(numbers[order], starts[1:]), strict=True)) if len(distinct) else {}
