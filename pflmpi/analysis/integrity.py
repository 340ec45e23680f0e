"""Whether every file of a run is as it was written."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pflmpi.config import stored
from pflmpi.errors import CheckpointError
from pflmpi.store import config_file, metrics_file, module_file, partition_file, probe_file, verify
from pflmpi.store.checked_hdf5 import damage, damaged_arrays
from pflmpi.store.names import SHARDS, round_of, round_path, rounds
from pflmpi.text import for_shell


@dataclass(frozen=True)
class CheckedFile:
    """One file, after every byte of it has been read.

    Attributes:
        problems: what is wrong with it, one line each.
    """

    path: Path
    bytes: int
    problems: list[str]


def files(run: Path) -> list[Path]:
    """The files of a run that have checksums: shards, also those no checkpoint needs, rounds, probes and modules.h5."""
    shards = [path for path in sorted((run / SHARDS).glob("*.h5")) if round_of(path.name) is not None]
    probes = [probe_file.path(run, round) for round in probe_file.rounds(run)]
    modules = [module_file.path(run)] if module_file.path(run).exists() else []
    return [*shards, *(round_path(run, round) for round in rounds(run)), *probes, *modules]


def check(run: Path) -> Iterator[CheckedFile]:
    """Check the text files and then each of `files`; a file that a running run deletes is left out.

    A round file is good when its own bytes are, and every shard that it needs is there and holds the clients it names.
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
                continue
            length = 0
        yield CheckedFile(path, length, problems)


def _find_problems(run: Path, path: Path, good: set[Path]) -> list[str]:
    """What is wrong with a file, one line each; `CheckpointError` where it is one thing alone."""
    if path == config_file.path(run):
        if not path.exists():
            taken = f"`pflmpi resume {for_shell(run)}` takes the configuration of the newest checkpoint"
            raise CheckpointError(f"{path} is missing; {taken}")
        stored.verified(run)
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
        problem = damage(path) if probed is None else probe_file.damage(run, probed)
        return [problem] if problem else damaged_arrays(path)
    problems = verify.checkpoint(run, number, whole=True, intact=good)
    if path in problems:
        return [problems[path]]
    needed = (problem for shard, problem in problems.items() if shard in good or not shard.exists())  # else said of it
    return [*damaged_arrays(path), *(f"{path}: {problem}" for problem in needed)]
