"""Deleting files that no checkpoint needs any more.

Round files are deleted before the shards that only they need, and their deletion is flushed before the first shard is
deleted: whenever the process is killed, every remaining round file finds its shards.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pflmpi import atomic
from pflmpi.errors import CheckpointError
from pflmpi.store import probe_file, verify
from pflmpi.store.names import SHARDS, round_of, round_path, rounds
from pflmpi.store.run_folder import read_layout


def prune(run: Path, keep: int, joined: Mapping[int, Collection[str]] | None = None) -> None:
    """Delete all round files but the newest `keep`, and the shards that none of the rest needs.

    Safe while other ranks write the shards of later rounds. A round file that cannot be read, or that lacks a shard,
    does not count as one of the newest; as long as one cannot be read, no shards are deleted.

    Args:
        keep: number of rounds; 0 for all.
        joined: the shards of rounds, by name, as far as known; of the others the round file is read.

    Raises:
        OSError: a file could not be deleted.
    """
    assert keep >= 0, keep
    if keep == 0:
        return
    usable, old, shards_of = 0, [], joined or {}
    present, shards = rounds(run), _shards(run)
    needed: set[str] = set()
    certain = True  # whether the shards that the remaining round files need are all known
    for round in reversed(present):
        if usable >= keep:
            old.append(round_path(run, round))
            continue
        try:
            files = shards_of[round] if round in shards_of else read_layout(run, round).files
        except CheckpointError:
            certain = False
            continue
        needed.update(files)
        usable += shards.keys() >= set(files)
    _delete(old[::-1], run)
    if certain:
        # Shards after the newest round are of an unfinished checkpoint. What a crash brings back is deleted next time.
        for name, round in shards.items():
            if name not in needed and round <= max(present, default=-1):
                (run / name).unlink(missing_ok=True)


def to_thin(run: Path, every: int | None, keep: int) -> tuple[list[int], list[Path]]:
    """The rounds that stay when a run is thinned, ascending, and the files that none of them needs, round files first.

    No process may be writing to the run.

    Args:
        every: rounds that are a multiple of it stay; None for no such round.
        keep: so many of the newest rounds stay too.

    Raises:
        CheckpointError: a round that would stay is damaged; of the newest every byte is read.
    """
    present = rounds(run)
    kept = [round for round in present if (every and round % every == 0) or round in present[-keep:]]
    needed: set[str] = set()
    for round in kept:
        if problems := verify.checkpoint(run, round, whole=round == present[-1]):
            what = f"round {round}, which would stay, is damaged: {'; '.join(problems.values())}"
            raise CheckpointError(f"{what}; nothing was deleted; restore its files from a copy")
        needed.update(read_layout(run, round).files)
    shards = (name for name, round in _shards(run).items() if name not in needed and round <= present[-1])
    return kept, [*(round_path(run, round) for round in present if round not in kept), *(run / name for name in shards)]


def delete(run: Path, files: Sequence[Path]) -> None:
    """Delete files of a run, round files before the shards that they need; raises `OSError`."""
    _delete([file for file in files if file.parent == run], run)
    _delete([file for file in files if file.parent != run], run / SHARDS)


def discard_after(run: Path, round: int | None) -> None:
    """Delete what a run left behind after the round to resume from: later rounds, shards, probes, partial files.

    No process may be writing to the run.

    Args:
        round: None for a run that begins, in a folder where one was stopped before its first checkpoint.

    Raises:
        CheckpointError: the layout of the round cannot be read.
        OSError: a file could not be deleted.
    """
    needed = set() if round is None else set(read_layout(run, round).files)
    last = -1 if round is None else round
    _delete([round_path(run, later) for later in reversed(rounds(run)) if later > last], run)
    _delete([probe_file.path(run, later) for later in probe_file.rounds(run) if later > last], run)
    shards = [run / name for name, its in _shards(run).items() if its > last and name not in needed]
    _delete(shards, run / SHARDS)
    for folder in (run, run / SHARDS):
        _delete(sorted(folder.glob(f"*.h5{atomic.TEMPORARY}")), folder)


def _shards(run: Path) -> dict[str, int]:
    """Round of each shard by its name, relative to the run."""
    names = sorted(os.listdir(run / SHARDS)) if (run / SHARDS).is_dir() else []
    return {f"{SHARDS}/{name}": round for name in names if (round := round_of(name)) is not None}


def _delete(paths: list[Path], folder: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
    if paths:
        atomic.flush_folder(folder)
