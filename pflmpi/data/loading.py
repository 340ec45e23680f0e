"""Loads the dataset of a `data` section: finds its folder, downloads, caches, and limits it."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pflmpi import outside
from pflmpi.data.cache import read_cached
from pflmpi.data.config import DataConfig
from pflmpi.data.dataset import Dataset, compute_digest, standardise, standardise_by_pixel
from pflmpi.data.own_files import has_unclear_channels, read_own
from pflmpi.data.sources import SOURCES
from pflmpi.data.sources.base import SHARED_FOLDER, Source
from pflmpi.data.splits import apportion, merge
from pflmpi.data.task_kinds import TASK_KINDS, TaskKind
from pflmpi.errors import ConfigError, DataError
from pflmpi.machine import expand_path
from pflmpi.rng import stream
from pflmpi.text import short_repr


def load(config: DataConfig, seed: int, cache: str | None = None) -> Dataset:
    """Loads the dataset that a configuration names.

    Args:
        config: the `data` section.
        seed: of the run; decides which samples a `limit` keeps.
        cache: folder for arrays shared by the ranks of a node; None for the user's own temporary one.

    Raises:
        ConfigError: an unknown name.
        DataError: a dataset that is missing, unreadable, or cannot be downloaded.
    """
    task_kind = TASK_KINDS[config.task]()
    dataset = _read(config, task_kind, cache)
    if dataset.task_kind.classes and task_kind.classes:
        dataset = replace(dataset, task_kind=task_kind)  # the configured one may have another loss
    elif dataset.task_kind != task_kind:
        raise DataError(
            f"data.task = {short_repr(config.task)}, and the labels of dataset {dataset.name!r} are of "
            f"{TASK_KINDS.name_of(type(dataset.task_kind))}; set data.task to that, or choose other data"
        )
    if config.normalize == "standard":
        if config.path is not None and has_unclear_channels(dataset.images, config.layout):
            shape = list(dataset.images.shape)
            raise DataError(
                f"data.normalize = standard scales each channel, and data.path = {config.path!r} holds sequences "
                f"{shape}: set data.layout to nchw if the channels are before the steps, or to nhwc if they are after "
                "them (models get them first then); images of one channel are [n, 1, H, W]"
            )
        dataset = standardise(dataset)
    if config.normalize == "pixel":
        dataset = standardise_by_pixel(dataset)
    if config.limit is None:
        return dataset
    return limit_samples(dataset, config.limit, stream(seed, 0, -1, "limit"))


def _read(config: DataConfig, task_kind: TaskKind, cache: str | None) -> Dataset:
    if config.path is not None:
        return read_own(Path(config.path), config.label, config.client, config.layout, task_kind)
    source = SOURCES[config.name]
    if isinstance(source, type):
        dataset = source(**config.options).read(Path(_find_data_folder(config) or "."))
        if not isinstance(dataset, Dataset):
            raise DataError(
                f"{outside.file_of(source)}: {source.__qualname__}.read returned a {type(dataset).__name__}; expected "
                "what pflmpi.data.dataset.assemble returns"
            )
        return dataset
    return source.read(Path()) if source.embedded else _read_from_folder(source, config, cache)


def limit_samples(dataset: Dataset, limit: int, rng: np.random.Generator) -> Dataset:
    """Returns `limit` samples of a dataset in their old order, or the dataset itself if it has no more.

    The classes keep their proportions, and every class keeps a sample if `limit` allows it; within a class the official
    training and test samples keep theirs, training first.
    """
    if limit >= len(dataset.labels):
        return dataset
    strata = dataset.strata
    sizes = np.bincount(strata, minlength=dataset.num_strata)
    present = np.flatnonzero(sizes)
    # One sample for each class first, the rest in proportion to what is left: a class never gets more than it has.
    floor = int(limit >= len(present))
    counts = apportion(limit, sizes[present] - floor, floor=floor)
    chosen = []
    for label, count in zip(present, counts, strict=True):
        of_class = strata == label
        sides = [rng.permutation(np.flatnonzero(of_class & (dataset.official_test == test))) for test in (False, True)]
        shares = apportion(int(count), np.array([len(side) for side in sides], dtype=np.float64))
        chosen += [side[:share] for side, share in zip(sides, shares, strict=True)]
    samples = merge(chosen)
    arrays: dict[str, Any] = {}
    for name in ("images", "labels", "official_test", "writers", "official_validation"):
        array = getattr(dataset, name)
        arrays[name] = None if array is None else array[samples]
    return replace(dataset, **arrays, digest=compute_digest(**arrays, num_classes=dataset.num_classes))


def _read_from_folder(source: Source, config: DataConfig, cache: str | None) -> Dataset:
    folder = _find_data_folder(config)
    if not folder:
        raise DataError(f"dataset {config.name!r} is read from files, and no data folder is set; {SHARED_FOLDER}")
    try:
        root = expand_path(folder)
        with suppress(FileNotFoundError, NotADirectoryError):
            root.stat()  # raises OSError for a name that no file can have; `exists` does not since Python 3.14
        if config.download:
            try:
                source.files(root)
            except DataError:
                source.fetch(root)
        files = source.files(root)
    except (OSError, ConfigError) as error:  # too long a name, no permission, ~ of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"the data folder {short_repr(folder)} cannot be read ({reason}); {SHARED_FOLDER}") from error
    return read_cached(source.name, files, lambda: source.read(root), cache)


def _find_data_folder(config: DataConfig) -> str | None:
    return config.root or os.environ.get("PFLMPI_DATA")  # the only place that reads it
