"""Checks every byte of every file of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pflmpi.config import stored
from pflmpi.errors import CheckpointError
from pflmpi.store import config_file, metrics_file, module_file, partition_file, probe_file, verify
from pflmpi.store.checked_hdf5 import damaged_arrays, find_damage
from pflmpi.store.names import SHARDS, round_of, round_path, rounds
from pflmpi.text import for_shell


@dataclass(frozen=True)
class CheckedFile:
    """A file of which every byte was checked."""

    path: Path
    bytes: int
    problems: list[str]  # what is wrong with it, one line each; none if it is intact


def files(run: Path) -> list[Path]:
    """The HDF5 files of a run: shards, including unused ones, round files, probes and modules.h5."""
    shards = [path for path in sorted((run / SHARDS).glob("*.h5")) if round_of(path.name) is not None]
    probes = [probe_file.path(run, round) for round in probe_file.rounds(run)]
    modules = [module_file.path(run)] if module_file.path(run).exists() else []
    return [*shards, *(round_path(run, round) for round in rounds(run)), *probes, *modules]


def check(run: Path) -> Iterator[CheckedFile]:
    """Checks the text files and then each of `files`; leaves out files that a running run deletes meanwhile.

    A round file is intact if its own bytes are, and every shard that it needs exists and holds the clients it names.
    """
    good: set[Path] = set()
    texts = [config_file.path(run), partition_file.path(run), metrics_file.path(run)]
    for path in [*texts, *files(run)]:
        try:
            problems = _find_problems(run, path, good)
        except CheckpointError as error:
            problems = [str(error)]
        if not problems:
            good.add(path)
        try:
            length = path.lstat().st_size
        except FileNotFoundError:
            if path not in texts or not problems:
                continue  # deleted meanwhile, or an optional text file
            length = 0
        yield CheckedFile(path, length, problems)


def _find_problems(run: Path, path: Path, good: set[Path]) -> list[str]:
    """The problems of a file, one line each; some are raised as `CheckpointError`.

    Args:
        good: files that were checked before and are intact.
    """
    if path == config_file.path(run):
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing; `pflmpi resume {for_shell(run)}` takes the configuration of the newest checkpoint"
            )
        stored.read_verified(run)
        return []
    if path == partition_file.path(run):
        verify.partition(run, stored.read(run)["recorded"])
        return []
    if path == metrics_file.path(run):
        verify.metrics(run, stored.last_round(stored.read(run)))
        return []
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a link to nothing; put the file there, or delete the link")
    number, probed = (of(path.name) if path.parent == run else None for of in (round_of, probe_file.round_of))
    if number is None:
        problem = find_damage(path) if probed is None else probe_file.find_damage(run, probed)
        return [problem] if problem else damaged_arrays(path)
    problems = verify.checkpoint(run, number, whole=True, intact=good)
    if path in problems:
        return [problems[path]]
    # Damage of an existing shard is reported for the shard itself.
    of_shards = [problem for shard, problem in problems.items() if shard in good or not shard.exists()]
    return [*damaged_arrays(path), *(f"{path}: {problem}" for problem in of_shards)]
