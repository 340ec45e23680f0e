"""From a `data` section to a dataset: the folder, the download, the cache, the limit."""

import os
from pathlib import Path

from pflmpi.data.cache import cached
from pflmpi.data.config import DataConfig
from pflmpi.data.dataset import Dataset
from pflmpi.data.sources import SOURCES
from pflmpi.data.sources.base import SHARED_FOLDER, Source
from pflmpi.data.subset import subset
from pflmpi.errors import DataError
from pflmpi.rng import stream


def load(config: DataConfig, seed: int, cache: Path | None = None) -> Dataset:
    """Return the dataset that a configuration names.

    Args:
        config: the `data` section.
        seed: of the run; decides which samples a `limit` keeps.
        cache: folder for arrays shared by the ranks of a node; None for the user's own temporary one.

    Raises:
        ConfigError: a name that is not known.
        DataError: a dataset that is missing, unreadable, or cannot be downloaded.
    """
    source = SOURCES[config.name]
    dataset = source.read(Path()) if source.embedded else _from_folder(source, config, cache)
    if config.limit is None:
        return dataset
    return subset(dataset, config.limit, stream(seed, 0, -1, "limit"))


def _from_folder(source: Source, config: DataConfig, cache: Path | None) -> Dataset:
    root = _root(config)
    if config.download:
        try:
            source.files(root)
        except DataError:
            source.fetch(root)
    return cached(source.name, source.files(root), lambda: source.read(root), cache)


def _root(config: DataConfig) -> Path:
    """Return the data folder: `data.root`, else PFLMPI_DATA, which is read nowhere else."""
    folder = config.root or os.environ.get("PFLMPI_DATA")
    if not folder:
        raise DataError(f"dataset {config.name!r} lies in files, and no data folder is set; {SHARED_FOLDER}")
    return Path(folder).expanduser()
