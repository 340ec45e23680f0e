"""Deleting what no checkpoint needs any more.

Round files go before the shards that only they need, and their going is on disk before the first shard goes: whatever
moment the process is killed at, every round file that is there finds its shards.
"""

from collections.abc import Collection
from pathlib import Path

from pflmpi.errors import CheckpointError
from pflmpi.store import atomic
from pflmpi.store.layout import Layout
from pflmpi.store.names import SHARDS, TEMPORARY, round_of, round_path, rounds
from pflmpi.store.reading import read_layout


def prune(run: Path, keep: int, protect: Collection[int] = ()) -> None:
    """Delete all round files but the newest `keep`, and the shards that none of them needs.

    It may run while other ranks write the shards of later rounds. A round file that cannot be read, or that misses a
    shard, does not count as one of the newest; while one that cannot be read is there, no shards are deleted.

    Args:
        keep: how many; 0 for all.
        protect: rounds that stay too.

    Raises:
        OSError: a file could not be deleted.
    """
    assert keep >= 0, keep
    if keep == 0:
        return
    usable, old = 0, []
    needed: list[Layout] = []
    certain = True  # what all remaining round files need is known
    for round in reversed(rounds(run)):
        if usable >= keep and round not in protect:
            old.append(round_path(run, round))
            continue
        try:
            layout = read_layout(run, round)
        except CheckpointError:
            certain = False
            continue
        needed.append(layout)
        usable += all((run / name).exists() for name in layout.files)
    _delete(old[::-1], run)
    if certain:
        # The shards after the newest round belong to a checkpoint that is not finished.
        newest = max(rounds(run), default=-1)
        _delete([path for path in _unneeded(run, needed) if _round(path) <= newest], run / SHARDS)


def discard_after(run: Path, round: int) -> None:
    """Delete what a run left behind after a round from which it is to continue: later rounds, shards, torn files.

    No process may be writing the run.

    Raises:
        CheckpointError: the layout of the round cannot be read.
        OSError: a file could not be deleted.
    """
    layout = read_layout(run, round)
    _delete([round_path(run, later) for later in reversed(rounds(run)) if later > round], run)
    _delete([path for path in _unneeded(run, [layout]) if _round(path) > round], run / SHARDS)
    for folder in (run, run / SHARDS):
        _delete(sorted(folder.glob(f"*.h5{TEMPORARY}")), folder)


def _unneeded(run: Path, layouts: Collection[Layout]) -> list[Path]:
    """Return the shards that none of the layouts names."""
    needed = {name for layout in layouts for name in layout.files}
    return [
        path
        for path in sorted((run / SHARDS).glob("*.h5"))
        if round_of(path.name) is not None and f"{SHARDS}/{path.name}" not in needed
    ]


def _round(path: Path) -> int:
    round = round_of(path.name)
    assert round is not None
    return round


def _delete(paths: list[Path], folder: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
    if paths:
        atomic.flush_folder(folder)
