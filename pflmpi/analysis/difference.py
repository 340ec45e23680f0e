"""What changed in a run between two rounds, leaf by leaf."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pflmpi.analysis.checkpoint import Round
from pflmpi.analysis.leaf_rows import LeafRows

_BYTES_AT_ONCE = 1 << 27


@dataclass(frozen=True)
class Change:
    """How far a leaf is from where it was: ||after - before|| / ||before||, in each client for itself.

    Attributes:
        leaf: "server/..." or "clients/...".
        shapes: before and after; None where the leaf is not there.
        clients: how many have the leaf; 0 for one of the server.
        changed: how many of them have another one than before; for the server 0 or 1.
        mean, largest: of the relative change over the clients; infinite where all was zero before, NaN where there
            are NaNs.
        where: the client with the largest change; -1 for the server, or where nothing changed.
    """

    leaf: str
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    clients: int
    changed: int
    mean: float
    largest: float
    where: int = -1


def difference(before: Round, after: Round, step: Callable[[int, int], None] = lambda done, all: None) -> list[Change]:
    """Return what changed between two rounds of a run, one entry for each leaf, also where nothing did.

    Only the clients that were written between the rounds are read, a part of them at a time.

    Args:
        step: told how many of how many leaves are done.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    servers = [{f"server/{path}": array for path, array in one.server.items()} for one in (before, after)]
    clients = [{f"clients/{path}": rows for path, rows in one.clients.items()} for one in (before, after)]
    written = after.written_since(before)
    leaves = [(leaf, servers) for leaf in _names(servers)] + [(leaf, clients) for leaf in _names(clients)]
    found = []
    for done, (leaf, sides) in enumerate(leaves, 1):
        found.append(_change(leaf, sides[0].get(leaf), sides[1].get(leaf), written))
        step(done, len(leaves))
    return found


def relative(before: np.ndarray, after: np.ndarray) -> float:
    """Return ||after - before|| / ||before|| in float64; 0 where both are zero.

    >>> relative(np.array([3.0, 4.0]), np.array([3.0, 3.0]))
    0.2
    """
    first = np.asarray(before, np.float64)
    apart = float(np.linalg.norm((np.asarray(after, np.float64) - first).ravel()))
    size = float(np.linalg.norm(first.ravel()))
    if apart == 0:
        return 0.0
    return apart / size if size else float("inf")


def _names(sides: list[dict[str, np.ndarray]] | list[dict[str, LeafRows]]) -> list[str]:
    return sorted(sides[0].keys() | sides[1].keys())


def _change(
    leaf: str, before: np.ndarray | LeafRows | None, after: np.ndarray | LeafRows | None, written: np.ndarray
) -> Change:
    shapes = (None if before is None else before.shape, None if after is None else after.shape)
    rows = before if after is None else after
    count = len(rows) if isinstance(rows, LeafRows) else 0
    if before is None or after is None or before.shape != after.shape:
        return Change(leaf, shapes, count, max(count, 1), float("nan"), float("nan"))
    if isinstance(before, LeafRows) and isinstance(after, LeafRows):
        return _rows_change(leaf, before, after, written)
    one, two = np.asarray(before), np.asarray(after)
    apart = relative(one, two)
    return Change(leaf, shapes, 0, int(not _same(one, two)), apart, apart)


def _rows_change(leaf: str, before: LeafRows, after: LeafRows, written: np.ndarray) -> Change:
    apart = np.zeros(len(after))
    changed = 0
    positions = np.flatnonzero(written[after.clients])
    width = max(1, _BYTES_AT_ONCE * len(after) // max(after.nbytes, 1))
    for start in range(0, len(positions), width):
        chosen = positions[start : start + width]
        for position, one, two in zip(chosen, before[chosen], after[chosen], strict=True):
            apart[position] = relative(one, two)
            changed += not _same(one, two)
    where = int(after.clients[np.nanargmax(apart)]) if changed and not np.isnan(apart).all() else -1
    mean, largest = (float(apart.mean()), float(apart.max())) if len(apart) else (0.0, 0.0)
    return Change(leaf, (before.shape, after.shape), len(after), changed, mean, largest, where)


def _same(before: np.ndarray, after: np.ndarray) -> bool:
    return before.dtype == after.dtype and before.tobytes() == after.tobytes()
