"""What processes that are gone have left in the folder of a run: half-written files, flags, locks."""

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from pflmpi.store.names import SHARDS, TEMPORARY, round_of

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_OFFSETS = (0, 512)  # where HDF5's own part begins: without and with the head that `store.image` puts before it
_LOCK = ".lock"  # how `sweep.lock` calls them
_LEVELS = 4  # a run of a sweep is three folders below the one with the lock

Stamp = tuple[int, int]


def unfinished(folder: Path) -> dict[str, Stamp]:
    """Return the half-written files of a run, or of the runs right below the folder: path -> (bytes, time stamp)."""
    found = {}
    for place in _places(folder):
        for path in _listed(place):
            if path.name.endswith((f".h5{TEMPORARY}", f"config.yaml{TEMPORARY}")):
                with contextlib.suppress(OSError):  # it was finished meanwhile
                    stat = path.stat()
                    found[str(path)] = (stat.st_size, stat.st_mtime_ns)
    return found


def abandoned(before: dict[str, Stamp], after: dict[str, Stamp]) -> tuple[str, ...]:
    """Return the half-written files that have not changed between two looks, and that no process here has open."""
    same = [path for path, stamp in after.items() if before.get(path) == stamp]
    busy = processes(same)
    return tuple(path for path in sorted(same) if path not in busy)


def flagged(folder: Path) -> tuple[str, ...]:
    """Return the checkpoint files whose flag says that somebody is writing them, though no process here is."""
    files = (path for place in _places(folder) for path in _listed(place) if round_of(path.name) is not None)
    marked = [str(path) for path in files if _flag(path)]
    busy = processes(marked)
    return tuple(path for path in sorted(marked) if path not in busy)


def locked(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the locks that are held on the run or on a sweep around it, with this host's processes that hold them."""
    sweeps = [place / _LOCK for place in [folder, *folder.parents][:_LEVELS]]
    held = [str(path) for path in (folder.parent / f".{folder.name}{_LOCK}", *sweeps) if _is_held(path)]
    holders = processes(held)
    return {path: tuple(holders.get(path, ())) for path in held}


def processes(paths: Collection[str]) -> dict[str, list[int]]:
    """Return the processes of this host that have the files open, as far as this user may see them."""
    found: dict[str, list[int]] = {}
    wanted = {os.path.realpath(path): path for path in paths}
    if not wanted:
        return found
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            for descriptor in (process / "fd").iterdir():
                path = wanted.get(_target(descriptor))
                if path is not None and int(process.name) not in found.setdefault(path, []):
                    found[path].append(int(process.name))
    return found


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""


def _places(folder: Path) -> Iterator[Path]:
    """Yield the folders with the files of runs: of this one, and of those right below."""
    runs = [folder, *(below for below in sorted(_listed(folder)) if below.name != SHARDS and below.is_dir())]
    for run in runs:
        yield from (run, run / SHARDS)


def _listed(folder: Path) -> Iterable[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _flag(path: Path) -> bool:
    """Return whether the superblock says that the file is open for writing: only its versions 2 and 3 can."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(_OFFSETS[-1] + 12)
        for offset in _OFFSETS:
            block = head[offset : offset + 12]
            if block.startswith(_SIGNATURE) and len(block) == 12:
                return block[8] in (2, 3) and bool(block[11] & 1)
    return False


def _is_held(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
