"""Read a checkpoint in one file; of any other file of a run, say where the rest is."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5
from pflmpi.store.digest import CLIENTS_AT_ONCE, digest_of_blocks
from pflmpi.store.hdf5 import File, Group
from pflmpi.store.layout import get as read_layout
from pflmpi.store.shard import ClientRows

COMPLETE = "complete"  # the attribute `content` of a file that needs no other


class Array(NamedTuple):
    """What a file says of one of its arrays; `value` only of single numbers."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bytes: int
    value: float | None


def check(path: Path) -> None:
    """Raise `CheckpointError` unless a path is a whole checkpoint in one file, every byte as it was written.

    The message says what else the path is, and what to do with that.
    """
    if problem := elsewhere(path):
        raise CheckpointError(problem)


def elsewhere(path: Path) -> str | None:
    """What a path is and where the state is, if it is no folder of a run; None for a checkpoint in one file."""
    try:
        checked_hdf5.recorded_checksum(path)
    except CheckpointError:
        return f"{path} is no folder; name the folder that `pflmpi run` printed"
    if problem := checked_hdf5.damage(path):
        return problem
    with checked_hdf5.reading(path) as file:
        about = checked_hdf5.about(file)
        if about.get("content") == COMPLETE:
            return None
        if "layout" not in file:
            rank = f" of rank {about['rank']}" if "rank" in about else ""
            return f"{path} is a part of a run{rank}, and not a checkpoint; name the folder of the run"
        return _of_index(path, file)


def _of_index(path: Path, file: File) -> str:
    round = int(checked_hdf5.about(file)["run"]["round"])
    files = read_layout(file).files
    there = sum((path.parent / name).exists() for name in files)
    if there == len(files):
        return f"{path} is the index of a checkpoint; name the folder of the run, {path.parent}, with --round {round}"
    return (
        f"{path} is only the index of a checkpoint: it has what the server keeps, but the state of the clients lies in "
        f"{len(files)} files of the folder shards/, of which {there} are beside it; copy the folder of the run as a "
        f"whole, or write one file where the run is: `pflmpi export RUN --round {round} --all -o one.h5`"
    )


def damaged_arrays(path: Path) -> None:
    """Raise `CheckpointError` unless each array is what its own checksum says."""
    if problems := checked_hdf5.damaged_arrays(path):
        raise CheckpointError("; ".join(problems))


def arrays(path: Path) -> list[Array]:
    """The arrays of the state, metrics and bytes of a checkpoint in one file, and its single numbers."""
    found = []
    with checked_hdf5.reading(path) as file:
        for section in ("server", "clients", "metrics", "bytes", "normalisation"):
            group, single = file.get(section, {}), checked_hdf5.numbers(file, section)
            for name in sorted([*checked_hdf5.names(group), *single]):
                array = single[name] if name in single else checked_hdf5.stored(group, name)
                value = (
                    None if array.shape else float(single[name] if name in single else checked_hdf5.get(group, name))
                )
                found.append(Array(f"{section}/{name}", array.shape, array.dtype, array.nbytes, value))
    return found


def digest(path: Path) -> str:
    """Digest of the state, the same as of the run's folder; only a few clients at a time are in memory."""
    with checked_hdf5.reading(path) as file:
        server = {name: checked_hdf5.get(file["server"], name) for name in checked_hdf5.names(file["server"])}
        return digest_of_blocks(server, _blocks(file["clients"]))


def _blocks(clients: Group) -> Iterator[ClientRows]:
    """The state of a few clients at a time, in ascending order of the ids."""
    paths = checked_hdf5.names(clients)
    cohorts = sorted({path.partition("/")[0] for path in paths if path.endswith("/client")})
    groups = {name: clients[name] for name in cohorts} if cohorts else {"cohort0": clients} if paths else {}
    ids = {
        name: checked_hdf5.get(group, "client") if cohorts else np.arange(len(group[paths[0]]), dtype=np.int64)
        for name, group in groups.items()
    }
    leaves = {
        name: [leaf for leaf in checked_hdf5.names(group) if not cohorts or leaf != "client"]
        for name, group in groups.items()
    }
    everyone = np.unique(np.concatenate([np.empty(0, np.int64), *ids.values()]))
    for start in np.unique(everyone // CLIENTS_AT_ONCE * CLIENTS_AT_ONCE).tolist():
        block: ClientRows = {}
        for name, group in groups.items():
            first, last = np.searchsorted(ids[name], [start, start + CLIENTS_AT_ONCE])
            if last > first:
                block[name] = (
                    ids[name][first:last],
                    {leaf: checked_hdf5.stored(group, leaf)[first:last] for leaf in leaves[name]},
                )
        yield block
