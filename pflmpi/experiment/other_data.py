"""Data that a run was not trained on, beside those of the run: the same kind of samples, the same classes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pflmpi.data import load
from pflmpi.data.class_names import CLASS_NAMES
from pflmpi.data.config import DataConfig
from pflmpi.data.dataset import Dataset
from pflmpi.data.sources import SOURCES
from pflmpi.data.unseen import Division
from pflmpi.errors import ConfigError
from pflmpi.text import some


def read(text: str, config: DataConfig) -> Dataset:
    """The data that a user names: a file or folder of one's own, or a known dataset.

    Raises:
        UserError: there is no such data.
    """
    if Path(text).exists() or text not in list(SOURCES):
        layout = config.layout if Path(text).suffix in (".npz", ".h5", ".hdf5") else None
        changes = {"path": text, "name": Path(text).stem, "limit": None, "layout": layout}
        section = config.model_copy(update=changes)
    else:
        section = DataConfig(name=text, root=config.root)
    return load(section, 0)


def matched(first: Dataset, other: Dataset) -> Dataset:
    """Other data with the labels and the order of columns that the first has; it may lack some classes.

    Raises:
        ConfigError: samples of another kind, or classes that the first does not have.
    """
    order = _matching_columns(first, other)
    images = other.images if order is None else np.ascontiguousarray(other.images[:, order])
    ours, theirs = (f"{one.dtype} {list(one.shape[1:])}" for one in (first.images, images))
    if ours != theirs:
        raise ConfigError(f"--data {other.name} has samples of {theirs}, the run {ours}; give data of the same kind")
    labels = _matching_labels(first, other)[other.labels]
    return replace(other, images=images, labels=labels, num_classes=first.num_classes)


def joined(first: Dataset, other: Dataset) -> Dataset:
    """Both datasets, which match, as one, with the normalisation of the first."""
    return replace(
        first,
        images=np.concatenate([first.images, other.images]),
        labels=np.concatenate([first.labels, other.labels]),
        official_test=np.concatenate([first.official_test, other.official_test]),
        writers=None,
    )


def of_clients(other: Dataset, division: Division) -> list[np.ndarray]:
    """The samples of each trained client in other data; all of them, if it does not say whose they are."""
    if other.writers is None:
        return [np.arange(len(other.labels))] * division.trained.num_clients
    who, n = np.unique(other.writers), len(division.numbers)
    if len(who) != n:
        raise ConfigError(
            f"--data {other.name} has samples of {len(who)} clients, and the run's partition has {n}; give as many, or "
            "leave out whose they are, to test every client on all"
        )
    return [np.flatnonzero(other.writers == who[number]) for number in division.numbers[: division.trained.num_clients]]


def _matching_columns(first: Dataset, other: Dataset) -> list[int] | None:
    """Where the columns of the first are in the other; None if both have them in one order, or one does not say."""
    if not first.columns or not other.columns or first.columns == other.columns:
        return None
    _refuse_unknown(other, "columns", first.columns, other.columns)
    _refuse_unknown(other, "columns", other.columns, first.columns)
    return [other.columns.index(name) for name in first.columns]


def _matching_labels(first: Dataset, other: Dataset) -> np.ndarray:
    """The label in the first that each class of the other has."""
    ours, theirs = _classes(first), _classes(other)
    numbers = _numbers(first)
    if not {*theirs} <= {*ours} and {*theirs} <= {*numbers}:  # labels where the run has names
        ours = numbers
    _refuse_unknown(other, "classes", ours, theirs)
    return np.array([ours.index(name) for name in theirs])


def _classes(dataset: Dataset) -> tuple[str, ...]:
    """What tells the classes [K] apart: their names, or what stands in the file."""
    named = dataset.class_names or dataset.written_labels or CLASS_NAMES.get(dataset.name)
    return named or _numbers(dataset)


def _numbers(dataset: Dataset) -> tuple[str, ...]:
    return tuple(map(str, range(dataset.num_classes)))


def _refuse_unknown(other: Dataset, what: str, ours: Sequence[str], theirs: Sequence[str]) -> None:
    if unknown := [name for name in theirs if name not in ours]:
        raise ConfigError(
            f"--data {other.name} and the run differ in {what}: only one has {some(unknown)}; those of the run are "
            f"{some(ours)}"
        )
