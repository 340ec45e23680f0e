"""Rows that live on some ranks and are wanted on others: moved from rank to rank, each at most once to a rank."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pflmpi import tree
from pflmpi.messages.kinds import with_rows
from pflmpi.messages.packing import pack, unpack
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
    for some in (some for rank, some in sent.items() if rank != here):
        if some.tobytes() not in packed:
            packed[some.tobytes()] = pack(rows(some))
    parts = {rank: packed[some.tobytes()] for rank, some in sent.items() if rank != here}
    sizes = {rank: size * len(some) for rank, some in arriving.items() if rank != here}
    received = {}
    if moved := delivery(wanted, home, like, down).moved:
        received = transport.exchange(parts, sizes, moved, down)
    if [*arriving] == [here]:
        return rows(wanted[here])
    found = tree.map(lambda leaf: torch.empty(len(wanted[here]), *leaf.shape, dtype=leaf.dtype), like)
    for rank, some in arriving.items():
        part = rows(some) if rank == here else unpack(received.pop(rank), with_rows(like, len(some)))
        places = torch.from_numpy(np.searchsorted(wanted[here], some))
        tree.map(lambda all, part, at=places: all.index_copy_(0, at, part), found, part)
    return found


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
    those, starts = np.unique(ranks[order], return_index=True)
    return dict(zip(those.tolist(), np.split(numbers[order], starts[1:]), strict=True)) if len(those) else {}
