"""Damaged data files of every kind are read as data, or refused in one line that names the file."""

import gzip
import io
import json
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from damage import damaged, damaged_arrays, damaged_json
from fuzzing import fuzz
from pflmpi.data import SOURCES
from pflmpi.data.config import DataConfig, PartitionConfig
from pflmpi.data.federation import build, save
from pflmpi.data.own_files import read_own
from pflmpi.errors import DataError
from raw_files import random_samples, toy, write_idx, write_leaf, write_sample

every_seed = given(st.integers(0, 2**32))


def check(read, file, good=None):
    """What is read is data, or the error is one line that names the file or the dataset; puts the file back."""
    try:
        read()
    except DataError as error:
        text = str(error)
        assert "\n" not in text and len(text) < 1000
        named = str(file) in text or str(file.parent.parent) in text or re.search("dataset '(femnist|mnist)'", text)
        assert named, text
    finally:
        file.unlink() if good is None else file.write_bytes(good)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    write_idx(folder / "MNIST" / "raw", "mnist", packed=True)
    write_idx(folder / "FashionMNIST" / "raw", "fashion_mnist", packed=False)
    write_leaf(folder / "femnist")
    write_sample(folder / "sample" / "FEMNIST")
    return folder


@fuzz(60)
@every_seed
def test_damaged_idx_files(root, seed):
    rng = random.Random(seed)
    for name in ("mnist", "fashion_mnist"):
        path = rng.choice(SOURCES[name].files(root))
        good = path.read_bytes()
        inside = path.suffix == ".gz" and rng.random() < 0.5
        path.write_bytes(gzip.compress(damaged(gzip.decompress(good), rng), 1) if inside else damaged(good, rng))
        check(lambda name=name: SOURCES[name].read(root), path, good)


@fuzz(60)
@every_seed
def test_damaged_arrays_in_npz_files(root, seed):
    rng = random.Random(seed)
    path = root / "sample" / "FEMNIST" / "femnist-sample.npz"
    good = path.read_bytes()
    if rng.random() < 0.5:
        path.write_bytes(damaged(good, rng))
    else:
        with np.load(io.BytesIO(good)) as archive:
            np.savez(path, **damaged_arrays(dict(archive), rng))
    check(lambda: SOURCES["femnist"].read(root / "sample"), path, good)


@fuzz(60)
@every_seed
def test_damaged_writers_of_mnist(root, seed):
    rng = random.Random(seed)
    (_, train), (_, test) = random_samples(1, 30, "mnist"), random_samples(2, 10, "mnist")
    arrays = {"train_label": train, "test_label": test, "train_writer": np.arange(30), "test_writer": np.arange(10)}
    path = root / "MNIST" / "writers.npz"
    np.savez(path, **damaged_arrays(arrays, rng))
    check(lambda: SOURCES["mnist"].read(root), path)


@fuzz(60)
@every_seed
def test_damaged_leaf_files(root, seed):
    rng = random.Random(seed)
    path = rng.choice(SOURCES["femnist"].files(root))
    good = path.read_bytes()
    if rng.random() < 0.3:
        path.write_bytes(damaged(good, rng))
    else:
        path.write_text(json.dumps(damaged_json(json.loads(good), rng)))
    check(lambda: SOURCES["femnist"].read(root), path, path.read_bytes())
    check(lambda: read_own(root / "femnist"), path, good)


@fuzz(60)
@every_seed
def test_damaged_partition_files(root, seed):
    rng = random.Random(seed)
    dataset, path = toy([20, 20], [5, 5]), root / "partition.npz"
    federation = build(dataset, PartitionConfig("iid", 4, {}), DataConfig(name="toy"), 0)
    save(federation, path)
    if rng.random() < 0.5:
        path.write_bytes(damaged(path.read_bytes(), rng))
    else:
        with np.load(path) as archive:
            arrays = dict(archive)
        np.savez(path, **damaged_arrays(arrays, rng))
    try:
        assert build(dataset, PartitionConfig(path=str(path)), DataConfig(name="toy"), 0).digest == federation.digest
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error)
