"""Changes in a run between two rounds, leaf by leaf."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint, LeafRows

_BYTES_AT_ONCE = 1 << 27

Leaf = np.ndarray | LeafRows


@dataclass(frozen=True)
class Change:
    """Relative change of a leaf, ||after - before|| / ||before||, for each client by itself.

    Attributes:
        path: "server/..." or "clients/...".
        shape_before, shape_after: None where the leaf is not there.
        clients: how many have the leaf; None for one of the server.
        changed: how many of them have another one than before; for the server 0 or 1.
        mean, largest: of the relative change over the clients; infinite where all was zero before, NaN where there
            are NaNs.
        largest_client: the one with the largest change; None for the server, or where nothing changed.
    """

    path: str
    shape_before: tuple[int, ...] | None
    shape_after: tuple[int, ...] | None
    clients: int | None
    changed: int
    mean: float
    largest: float
    largest_client: int | None = None


def difference(
    before: Checkpoint, after: Checkpoint, step: Callable[[int, int], None] = lambda done, all: None
) -> list[Change]:
    """Changes between two rounds of a run, one entry for each leaf, also for those without any.

    Only the clients that were written between the rounds are read, a part of them at a time.

    Args:
        step: called with how many of how many leaves are done.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    first, second = (_collect_leaves(checkpoint) for checkpoint in (before, after))
    names = [name for side in ("server/", "clients/") for name in sorted(first | second) if name.startswith(side)]
    written = after.written_since(before)
    changes = []
    for done, name in enumerate(names, 1):
        changes.append(_compute_change(name, first.get(name), second.get(name), written))
        step(done, len(names))
    return changes


def relative_change(before: np.ndarray, after: np.ndarray) -> float:
    """||after - before|| / ||before|| in float64; 0 where both are zero.

    >>> relative_change(np.array([3.0, 4.0]), np.array([3.0, 3.0]))
    0.2
    """
    first = np.asarray(before, np.float64)
    apart = float(np.linalg.norm((np.asarray(after, np.float64) - first).ravel()))
    size = float(np.linalg.norm(first.ravel()))
    if apart == 0:
        return 0.0
    return apart / size if size else float("inf")


def _collect_leaves(checkpoint: Checkpoint) -> dict[str, Leaf]:
    sides: dict[str, Mapping[str, Leaf]] = {"server": checkpoint.server, "clients": checkpoint.clients}
    return {f"{side}/{path}": leaf for side, leaves in sides.items() for path, leaf in leaves.items()}


def _compute_change(name: str, before: Leaf | None, after: Leaf | None, written: np.ndarray) -> Change:
    shapes = (None if before is None else before.shape, None if after is None else after.shape)
    rows = before if after is None else after
    count = len(rows) if isinstance(rows, LeafRows) else 0
    if before is None or after is None or before.shape != after.shape:
        return Change(name, *shapes, count or None, max(count, 1), float("nan"), float("nan"))
    if not isinstance(after, LeafRows):
        apart = relative_change(np.asarray(before), after)
        return Change(name, *shapes, None, int(not _are_identical(np.asarray(before), after)), apart, apart)
    all_apart, changed = np.zeros(count), 0
    positions = np.flatnonzero(written[after.clients])
    width = max(1, _BYTES_AT_ONCE * count // max(after.nbytes, 1))
    for start in range(0, len(positions), width):
        chosen = positions[start : start + width]
        for position, old, new in zip(chosen, before[chosen], after[chosen], strict=True):
            all_apart[position] = relative_change(old, new)
            changed += not _are_identical(old, new)
    where = int(after.clients[np.nanargmax(all_apart)]) if changed and not np.isnan(all_apart).all() else None
    mean, largest = (float(all_apart.mean()), float(all_apart.max())) if count else (0.0, 0.0)
    return Change(name, *shapes, count or None, changed, mean, largest, where)


def _are_identical(before: np.ndarray, after: np.ndarray) -> bool:
    return before.dtype == after.dtype and before.tobytes() == after.tobytes()
