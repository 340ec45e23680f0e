"""Whether the data that a configuration names now are those that a run was made with."""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

from pflmpi import outside
from pflmpi.config import stored
from pflmpi.config.load import Config
from pflmpi.config.sections import by_key
from pflmpi.data import load
from pflmpi.errors import CheckpointError, UserError
from pflmpi.experiment.build import divide, load_federation
from pflmpi.runtime.config import DATA_PATHS
from pflmpi.store import config_file


def check_hash(run: Path, name: str, what: str, digest: str) -> None:
    """Raises `CheckpointError` if a run has recorded another hash.

    Args:
        name: in the section `recorded`.
        what: words for it, with a verb, such as "data has".
        digest: now.
    """
    expected = str(stored.read(run)["recorded"].get(name, digest))
    if expected != digest:
        raise CheckpointError(
            f"the {what} changed since {run} was written: hash {expected[:12]} then, {digest[:12]} now; put back the "
            "same files, or start a new run"
        )


def check_data(run: Path, config: Config, changed: Collection[str]) -> None:
    """Raises `CheckpointError` if a configuration names other data, or another saved partition, than those of a run.

    They are read only if they lie elsewhere, or have changed since the run was written. Where they cannot be read, as
    on another machine, only the names of files are compared.

    Args:
        changed: the options that differ between the run and the configuration, by dotted key.
    """
    times = [*_read_change_times(config)]
    if not ({*DATA_PATHS, "data.root"} & {*changed} or max(times, default=0) >= _read_start(run)):
        return
    try:
        data, partition = _read_digests(_Sources.of(config, times))
    except UserError as error:
        before, now = by_key(stored.read(run)), by_key(config.resolved())
        for key in DATA_PATHS:
            old, new = (str(options.get(key)) for options in (before, now))
            if Path(old).name != Path(new).name:
                raise CheckpointError(f"{key} = {old} in {run}, {new} now, which cannot be read: {error}") from error
        return
    check_hash(run, "data", "data has", data)
    if partition:
        check_hash(run, "partition", "partition has", partition)


@dataclass(frozen=True)
class _Sources:
    """Where data and partition come from; equal if `text` is."""

    text: str  # all that decides their content, also when the files last changed
    config: Config = field(compare=False)

    @classmethod
    def of(cls, config: Config, times: list[int]) -> "_Sources":
        config = replace(config, data=config.data.model_copy(update={"download": False}))
        seed = config.seed if config.data.limit is not None or config.partition.path is not None else None
        values = config.data.resolved(), config.partition.path, config.evaluation.unseen, seed, times
        return cls(json.dumps(values), config)


@lru_cache(maxsize=64)  # the cells of a sweep have few datasets
def _read_digests(sources: _Sources) -> tuple[str, str]:
    """The hashes of the data, and of the partition if it is a saved one, else ""."""
    config = sources.config
    with outside.as_config_error():
        if config.partition.path is None:
            return load(config.data, config.seed, config.runtime.cache).digest, ""
        federation = load_federation(config)
        return federation.dataset.digest, divide(config, federation).digest


def _read_change_times(config: Config) -> Iterator[int]:
    """When the files of data and partition last changed, in nanoseconds; of a folder, it and what lies directly in it.

    By ctime, because a file that is moved to the place of another keeps its mtime.
    """
    for path in (Path(path) for path in (config.data.path, config.partition.path) if path is not None):
        with suppress(OSError):
            for file in chain([path], path.iterdir() if path.is_dir() else ()):
                yield file.stat().st_ctime_ns


def _read_start(run: Path) -> int:
    """When a run was started or last resumed, in nanoseconds; 0 if that is unknown."""
    try:
        return config_file.path(run).stat().st_mtime_ns
    except OSError:
        return 0
