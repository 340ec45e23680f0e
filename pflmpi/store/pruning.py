"""Deleting files that no checkpoint needs any more.

Round files are deleted before the shards that only they need, and their deletion is flushed before the first shard is
deleted: whenever the process is killed, every remaining round file finds its shards.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pflmpi import atomic
from pflmpi.errors import CheckpointError
from pflmpi.store import module_file, probe_file, verify
from pflmpi.store.names import SHARDS, round_of, round_path, rounds
from pflmpi.store.run_folder import read_layout


def prune(run: Path, keep: int, known_shards: Mapping[int, Collection[str]] | None = None) -> None:
    """Delete all round files but the newest `keep`, and the shards that no remaining one needs.

    Safe while other ranks write the shards of later rounds. A round file that cannot be read, or that lacks a shard,
    does not count as one of the newest; as long as one cannot be read, no shards are deleted.

    Args:
        keep: number of rounds; 0 for all.
        known_shards: names of the shards by round; the layout of other rounds is read from their files.

    Raises:
        OSError: a file could not be deleted.
    """
    assert keep >= 0, keep
    if keep == 0:
        return
    num_intact, old, known_shards = 0, [], known_shards or {}
    present, shards = rounds(run), _shards(run)
    needed: set[str] = set()
    all_known = True  # whether the shards that the remaining round files need are all known
    for round in reversed(present):
        if num_intact >= keep:
            old.append(round_path(run, round))
            continue
        try:
            names = known_shards[round] if round in known_shards else read_layout(run, round).files
        except CheckpointError:
            all_known = False
            continue
        needed.update(names)
        num_intact += shards.keys() >= set(names)
    _delete(old[::-1], run)
    if all_known:
        # Shards after the newest round are of an unfinished checkpoint. What a crash brings back is deleted next time.
        for name, round in shards.items():
            if name not in needed and round <= max(present, default=-1):
                (run / name).unlink(missing_ok=True)


def choose_files_to_prune(run: Path, every: int | None, keep: int) -> tuple[list[int], list[Path]]:
    """Returns the rounds to keep, ascending, and the files that none of them needs, round files first.

    No process may be writing to the run.

    Args:
        every: keep the rounds that are a multiple of it; None for no such round.
        keep: number of newest rounds to keep too, at least 1.

    Raises:
        CheckpointError: there is no checkpoint, or a round to keep is damaged; every byte of them is read.
    """
    present = verify.list_rounds(run)
    kept = [round for round in present if (every and round % every == 0) or round in present[-keep:]]
    needed: set[str] = set()
    for round in kept:
        if problems := verify.checkpoint(run, round, whole=True, intact={run / name for name in needed}):
            what = f"round {round}, which would stay, is damaged: {'; '.join(problems.values())}"
            raise CheckpointError(f"{what}; nothing was deleted; restore its files from a copy")
        needed.update(read_layout(run, round).files)
    round_files = [round_path(run, round) for round in present if round not in kept]
    shards = [run / name for name, round in _shards(run).items() if name not in needed and round <= present[-1]]
    return kept, [*round_files, *shards]


def delete(run: Path, files: Sequence[Path]) -> None:
    """Delete files of a run, round files before the shards that they need; raises `OSError`."""
    _delete([file for file in files if file.parent == run], run)
    _delete([file for file in files if file.parent != run], run / SHARDS)


def discard_after(run: Path, round: int | None) -> None:
    """Delete later rounds, shards and probes than the round to resume from, and partial files.

    No process may be writing to the run.

    Args:
        round: None for a run that starts, in a folder where one was stopped before its first checkpoint.

    Raises:
        CheckpointError: the layout of the round cannot be read.
        OSError: a file could not be deleted.
    """
    needed = set() if round is None else set(read_layout(run, round).files)
    last = -1 if round is None else round
    if round is None:
        module_file.path(run).unlink(missing_ok=True)  # a run without such models writes none
    _delete([round_path(run, later) for later in reversed(rounds(run)) if later > last], run)
    _delete([probe_file.path(run, later) for later in probe_file.rounds(run) if later > last], run)
    shards = [run / name for name, later in _shards(run).items() if later > last and name not in needed]
    _delete(shards, run / SHARDS)
    for folder in (run, run / SHARDS):
        partial = [path for suffix in ("h5", "csv", "yaml") for path in folder.glob(f"*.{suffix}{atomic.TEMPORARY}")]
        _delete(sorted(partial), folder)


def _shards(run: Path) -> dict[str, int]:
    """Lists the shards in the folder: round by name, which is relative to the run."""
    names = sorted(os.listdir(run / SHARDS)) if (run / SHARDS).is_dir() else []
    return {f"{SHARDS}/{name}": round for name in names if (round := round_of(name)) is not None}


def _delete(paths: list[Path], folder: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
    if paths:
        atomic.flush_folder(folder)
