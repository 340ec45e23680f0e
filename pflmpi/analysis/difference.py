"""How much each leaf of a run changed between two rounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pflmpi.analysis.checkpoint import Checkpoint, LeafRows

_BYTES_AT_ONCE = 1 << 27

Leaf = np.ndarray | LeafRows


@dataclass(frozen=True)
class Change:
    """Relative change of a leaf, ||after - before|| / ||before||, computed for each client.

    Attributes:
        path: "server/..." or "clients/...".
        shape_before, shape_after: None if the leaf does not exist.
        clients: number of clients that have the leaf; None for one of the server.
        changed: number of them whose leaf changed; for the server 0 or 1.
        mean, largest: over the clients' relative changes; infinite if a leaf was all zero before, NaN if it has NaNs.
        largest_client: the client with the largest change; None for the server, or if nothing changed.
    """

    path: str
    shape_before: tuple[int, ...] | None
    shape_after: tuple[int, ...] | None
    clients: int | None
    changed: int
    mean: float
    largest: float
    largest_client: int | None = None


def compute_changes(
    before: Checkpoint, after: Checkpoint, step: Callable[[int, int], None] = lambda done, all: None
) -> list[Change]:
    """The change of every leaf between two rounds of a run, including leaves that did not change.

    Reads only the clients that were written between the rounds, in blocks.

    Args:
        step: called with the number of leaves that are done, and of all.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    old, new = _collect_leaves(before), _collect_leaves(after)
    paths = [path for side in ("server/", "clients/") for path in sorted(old | new) if path.startswith(side)]
    written = after.written_since(before)
    changes = []
    for done, path in enumerate(paths, 1):
        changes.append(_compute_change(path, old.get(path), new.get(path), written))
        step(done, len(paths))
    return changes


def relative_change(before: np.ndarray, after: np.ndarray) -> float:
    """||after - before|| / ||before|| in float64; 0 where both are zero.

    >>> relative_change(np.array([3.0, 4.0]), np.array([3.0, 3.0]))
    0.2
    """
    old = np.asarray(before, np.float64)
    distance = float(np.linalg.norm((np.asarray(after, np.float64) - old).ravel()))
    norm = float(np.linalg.norm(old.ravel()))
    if distance == 0:
        return 0.0
    return distance / norm if norm else float("inf")


def _collect_leaves(checkpoint: Checkpoint) -> dict[str, Leaf]:
    sides: dict[str, Mapping[str, Leaf]] = {"server": checkpoint.server, "clients": checkpoint.clients}
    return {f"{side}/{path}": leaf for side, leaves in sides.items() for path, leaf in leaves.items()}


def _compute_change(path: str, before: Leaf | None, after: Leaf | None, written: np.ndarray) -> Change:
    """The change of one leaf; `written` [N] are the clients whose rows may differ."""
    shapes = (None if before is None else before.shape, None if after is None else after.shape)
    rows = before if after is None else after
    count = len(rows) if isinstance(rows, LeafRows) else 0
    if before is None or after is None or before.shape != after.shape:
        return Change(path, *shapes, count or None, max(count, 1), float("nan"), float("nan"))
    if not isinstance(after, LeafRows):
        change = relative_change(np.asarray(before), after)
        return Change(path, *shapes, None, int(not _are_identical(np.asarray(before), after)), change, change)
    changes, changed = np.zeros(count), 0
    positions = np.flatnonzero(written[after.clients])
    width = max(1, _BYTES_AT_ONCE * count // max(after.nbytes, 1))
    for start in range(0, len(positions), width):
        block = positions[start : start + width]
        for position, old, new in zip(block, before[block], after[block], strict=True):
            changes[position] = relative_change(old, new)
            changed += not _are_identical(old, new)
    largest_client = int(after.clients[np.nanargmax(changes)]) if changed and not np.isnan(changes).all() else None
    mean, largest = (float(changes.mean()), float(changes.max())) if count else (0.0, 0.0)
    return Change(path, *shapes, count or None, changed, mean, largest, largest_client)


def _are_identical(before: np.ndarray, after: np.ndarray) -> bool:
    return before.dtype == after.dtype and before.tobytes() == after.tobytes()
