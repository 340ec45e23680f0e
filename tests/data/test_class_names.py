"""The names of classes are those of the datasets' own files."""

import pickle

import numpy as np
import pytest

from pflmpi.data import SOURCES
from pflmpi.data.class_names import CLASS_NAMES


def test_every_dataset_has_names():
    assert sorted(CLASS_NAMES) == sorted(SOURCES)
    assert all(len(set(names)) == len(names) for names in CLASS_NAMES.values())


@pytest.mark.parametrize(
    ("name", "file", "key"),
    [
        ("cifar10", "cifar-10-batches-py/batches.meta", "label_names"),
        ("cifar100", "cifar-100-python/meta", "fine_label_names"),
    ],
)
def test_the_names_are_those_in_the_files(name, file, key, data_root):
    with open(data_root / file, "rb") as opened:
        assert CLASS_NAMES[name] == tuple(pickle.load(opened, encoding="latin1")[key])


def test_there_is_a_name_for_each_class(data_root):
    for name in ("fashion_mnist", "femnist"):
        dataset = SOURCES[name].read(data_root)
        assert dataset.num_classes == len(CLASS_NAMES[name]) >= int(np.max(dataset.labels)) + 1
