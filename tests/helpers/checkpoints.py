"""The checkpoints of a run that goes on."""

from pathlib import Path

from pflmpi.store import run_folder
from pflmpi.store.records.conversion import pending


def complete(run: Path) -> list[int]:
    """The rounds that must not be lost, ascending: HDF5 or recorded."""
    return sorted({*run_folder.rounds(run), *pending(run)})
