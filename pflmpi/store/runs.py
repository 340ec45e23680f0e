"""Finding runs in folders, and telling their files from others."""

import contextlib
import logging
import os
import re
from functools import cache
from pathlib import Path

from pflmpi.atomic import TEMPORARY
from pflmpi.store import (
    config_file,
    events_file,
    job_file,
    metrics_file,
    module_file,
    partition_file,
    probe_file,
    run_lock,
)
from pflmpi.store.names import SHARDS, round_of, rounds
from pflmpi.text import join_truncated, printable

_log = logging.getLogger(__name__)
_SET_ASIDE = re.compile(r"old-.+-\d+")  # the name that `sweep --anew` gives to a run it replaces


def is_run(folder: Path) -> bool:
    """Whether a folder looks like a run, complete or not: it has the configuration of one, a checkpoint or a shard."""
    if config_file.is_of_run(folder):
        return True
    shards = folder / SHARDS
    with contextlib.suppress(PermissionError):  # of a folder that nobody else may list
        names = [path.name for path in shards.iterdir()] if shards.is_dir() else []
        return bool(rounds(folder)) or any(round_of(name) is not None for name in names)
    return False


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else all runs below it, sorted.

    Runs that a sweep has set aside, and hidden folders, are left out. Links to runs count as runs. Links to other
    folders are not followed, because they may form cycles; a warning names them.
    """
    if is_run(folder):
        return [folder]
    runs, links = list[Path](), list[str]()
    for parent, names, _ in os.walk(folder):
        below = [Path(parent, name) for name in names if not (name.startswith(".") or _SET_ASIDE.fullmatch(name))]
        inside = [path for path in below if is_run(path)]
        runs += inside
        links += [str(path) for path in below if path.is_symlink() and path not in inside]
        names[:] = [path.name for path in below if path not in inside]
    if links:
        _warn_of_links(join_truncated(links, 8))
    return sorted(runs)


def is_file_of_run(path: Path) -> bool:
    """Whether a file has the name of a checkpoint or a probe, or lies in a run and has the name of one of its files."""
    if round_of(path.name) is not None or probe_file.round_of(path.name) is not None:
        return True
    files = (config_file, events_file, job_file, metrics_file, module_file, partition_file, run_lock)
    return path in [file.path(path.parent) for file in files] and is_run(path.parent)


def find_replaced_files(folder: Path) -> list[Path]:
    """Lists files in a folder that a run which starts in it would replace, delete or extend."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    files = (config_file, events_file, metrics_file, module_file, partition_file)
    names = [file.path(folder).name for file in files]
    return [
        path
        for path in paths
        if path.name in names or path.match(f"*.h5{TEMPORARY}") or probe_file.round_of(path.name) is not None
    ]


@cache  # one warning, however often `watch` looks
def _warn_of_links(links: str) -> None:
    _log.warning("links to folders that are no runs are not followed: %s; name these too", printable(links))
