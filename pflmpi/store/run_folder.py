"""The folder of a run: its rounds, whether they are intact, and what is in them."""

from pathlib import Path

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5
from pflmpi.store import verify as checks
from pflmpi.store.digest import digest
from pflmpi.store.names import SHARDS, round_path, rounds
from pflmpi.store.one_file import elsewhere
from pflmpi.store.pruning import discard_after, prune
from pflmpi.store.reading import (
    read_array,
    read_attributes,
    read_bytes,
    read_checksums,
    read_clients,
    read_diagnostics,
    read_kinds,
    read_layout,
    read_metrics,
    read_metrics_checksum,
    read_normalisation,
    read_pieces,
    read_received,
    read_server,
)

__all__ = [
    "digest",
    "discard_after",
    "newest_good",
    "prune",
    "read_array",
    "read_attributes",
    "read_bytes",
    "read_checksums",
    "read_clients",
    "read_diagnostics",
    "read_kinds",
    "read_layout",
    "read_metrics",
    "read_metrics_checksum",
    "read_normalisation",
    "read_pieces",
    "read_received",
    "read_server",
    "rounds",
    "verify",
]


def verify(run: Path, round: int) -> list[str]:
    """Problems of a round, one line each; every byte of it is read."""
    return list(checks.checkpoint(run, round, whole=True).values())


def newest_good(run: Path) -> tuple[int, list[str]]:
    """Newest round without problems, and the problems of the newer ones that were skipped.

    Raises:
        CheckpointError: the folder is not a run, or has no intact round.
    """
    if not run.is_dir():
        raise CheckpointError(elsewhere(run) or f"{run} is a checkpoint in one file, and no folder of a run")
    present = rounds(run)
    if not present:
        names = ", ".join(sorted(path.name for path in run.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"{run} has no checkpoint: it holds {names}, and no round_00000.h5 or later; name the folder that "
            "`pflmpi run` printed, or start again with `pflmpi run`"
        )
    skipped: list[str] = []
    for round in reversed(present):
        if round_path(run, round).is_dir():
            raise CheckpointError(f"{round_path(run, round)} is a directory named like a checkpoint; move it away")
        problems = verify(run, round)
        if not problems:
            return round, skipped
        skipped += problems
    newest = round_path(run, present[-1])
    if not (run / SHARDS).is_dir() and not checked_hdf5.damage(newest) and (lone := elsewhere(newest)):
        raise CheckpointError(lone)
    raise CheckpointError(
        f"{run} has no good checkpoint among {len(present)}: {'; '.join(dict.fromkeys(skipped))}; restore the files "
        "from a copy, or start again with `pflmpi run`"
    )
