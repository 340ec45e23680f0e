"""Sources of data: one suite that every source passes, and what is particular to each. No network is used."""

import functools
import gzip
import hashlib
import http.server
import json
import os
import pickle
import re
import threading
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torchvision

from pflmpi.data import SOURCES, load
from pflmpi.data.class_names import CLASS_NAMES
from pflmpi.data.config import DataConfig
from pflmpi.data.dataset import compute_digest
from pflmpi.data.numbers import to_integers
from pflmpi.data.partitions import PARTITIONS
from pflmpi.errors import ConfigError, DataError
from raw_files import (
    NUM_CLASSES,
    SHAPES,
    alike,
    idx_bytes,
    random_samples,
    write_cifar,
    write_idx,
    write_leaf,
    write_sample,
)

REAL = {"mnist": 70000, "fashion_mnist": 70000, "cifar10": 60000, "cifar100": 60000, "femnist": 18796}
NOWHERE = "http://127.0.0.1:9/"  # the discard port: a connection is refused at once


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data folder with a few samples of every source, in the files' own formats."""
    monkeypatch.delenv("PFLMPI_DATA", raising=False)
    folder = tmp_path / "data"
    write_idx(folder / "MNIST" / "raw", "mnist", packed=True)
    write_idx(folder / "FashionMNIST" / "raw", "fashion_mnist", packed=False)
    write_idx(folder / "EMNIST" / "raw", "emnist", packed=False)
    write_cifar(folder, "cifar10", monkeypatch)
    write_cifar(folder, "cifar100", monkeypatch)
    write_leaf(folder / "femnist")
    return folder


def config(name, root, **more):
    return DataConfig.model_validate({"name": name, "root": str(root) if root else None, **more})


every_source = pytest.mark.parametrize("name", list(SOURCES))
every_file_source = pytest.mark.parametrize("name", [name for name in SOURCES if not SOURCES[name].embedded])


@every_source
def test_a_source_gives_well_formed_arrays(name, root, tmp_path):
    data = load(config(name, root), seed=0, cache=str(tmp_path / "cache"))
    count = len(data.labels)
    assert data.name == name and data.num_classes == NUM_CLASSES[name]
    assert data.images.dtype == np.uint8 and data.images.shape == (count, *SHAPES.get(name, (1, 28, 28)))
    assert data.labels.dtype == np.int64 and 0 <= data.labels.min() <= data.labels.max() < data.num_classes
    assert data.official_test.dtype == np.bool_ and data.official_test.shape == (count,)
    assert 0 < data.official_test.sum() < count
    assert data.mean == data.std == (0.5,) * data.images.shape[1]
    assert data.digest == compute_digest(data.images, data.labels, data.official_test, data.writers, data.num_classes)


@every_source
def test_a_source_has_a_summary_of_one_line(name):
    summary = SOURCES[name].summary
    assert SOURCES[name].name == name
    assert 10 < len(summary) < 110 and "\n" not in summary


@every_source
def test_reading_again_gives_the_same_with_and_without_cache(name, root, tmp_path):
    first = load(config(name, root), seed=0, cache=str(tmp_path / "cache"))
    again = load(config(name, root), seed=0, cache=str(tmp_path / "cache"))
    plain = SOURCES[name].read(root)
    assert alike(first, plain) and alike(again, plain)
    if not SOURCES[name].embedded:
        assert not again.images.flags.writeable and isinstance(again.images.base, np.memmap)


@every_file_source
@pytest.mark.parametrize("empty", [True, False], ids=["empty folder", "no folder"])
def test_missing_data_is_one_error_with_the_folder_and_two_ways_to_get_it(name, empty, tmp_path):
    folder = tmp_path / "nothing"
    if empty:
        folder.mkdir()
    with pytest.raises(DataError) as caught:
        load(config(name, folder), seed=0, cache=str(tmp_path / "cache"))
    message = str(caught.value)
    assert str(folder) in message and repr(name) in message
    assert ("LEAF's data/femnist/preprocess.sh" if name == "femnist" else "data.download: true") in message
    assert "put the files there" in message and "PFLMPI_DATA" in message and "\n" not in message


@every_file_source
@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_file_is_named(name, damage, root, tmp_path):
    for path in SOURCES[name].files(root):
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2] if damage == "truncated" else b"not what it should be" * 20)
        with pytest.raises(DataError) as caught:
            load(config(name, root), seed=0, cache=str(tmp_path / "cache"))
        assert str(path) in str(caught.value)
        path.write_bytes(good)
    assert len(load(config(name, root), seed=0, cache=str(tmp_path / "cache")).labels) > 0


@every_file_source
def test_without_a_folder_the_error_says_how_to_name_one(name, monkeypatch):
    monkeypatch.delenv("PFLMPI_DATA", raising=False)
    with pytest.raises(DataError, match=r"no data folder is set; set data\.root, or .* PFLMPI_DATA"):
        load(config(name, None), seed=0)


@every_file_source
def test_a_failed_download_is_a_data_error(name, tmp_path, monkeypatch):
    for reader in ("MNIST", "FashionMNIST"):
        monkeypatch.setattr(getattr(torchvision.datasets, reader), "mirrors", [NOWHERE])
    for reader in ("CIFAR10", "CIFAR100", "EMNIST"):
        monkeypatch.setattr(getattr(torchvision.datasets, reader), "url", NOWHERE + "archive.tar.gz")
    with pytest.raises(DataError) as caught:
        load(config(name, tmp_path / "new", download=True), seed=0, cache=str(tmp_path / "cache"))
    expected = "cannot be fetched by data.download" if name == "femnist" else "check the network, or copy the files"
    assert expected in str(caught.value) and str(tmp_path / "new") in str(caught.value)


@every_source
def test_download_uses_no_network_for_data_that_is_there(name, root, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("tried to download")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    dataset = load(config(name, root, download=True), seed=0, cache=str(tmp_path / "cache"))
    assert alike(dataset, load(config(name, root), seed=0, cache=str(tmp_path / "cache")))


@pytest.mark.parametrize("name", REAL)
def test_the_real_data_is_read_completely(name, data_root, tmp_path):
    if name == "cifar100" and not (data_root / "cifar-100-python").is_dir():
        pytest.skip("needs real data: set PFLMPI_DATA to a folder with CIFAR-100")
    data = load(config(name, data_root), seed=0, cache=str(tmp_path))
    assert len(data.labels) == REAL[name]
    assert len(np.unique(data.labels)) == NUM_CLASSES[name]


def test_an_unknown_source_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="unknown dataset 'mnits'; did you mean 'mnist'"):
        load(DataConfig(name="mnits"), seed=0)


def test_a_file_in_the_place_of_a_name_is_told_its_key(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("ok.npz", "./ok.csv", str(tmp_path / "photos")):
        expected = re.escape(f"for a file or folder: data: {{path: '{name}'}}")
        with pytest.raises(ConfigError, match=f"unknown dataset .*; {expected}"):
            load(DataConfig(name=name), seed=0)
    with pytest.raises(ConfigError, match=r"unknown partition .*; for a file or folder: partition: {path: 'p.npz'}"):
        PARTITIONS["p.npz"]
    with pytest.raises(ConfigError, match=r"known: [^;]*$"):
        load(DataConfig(name="photo"), seed=0)


def test_idx_files_come_out_as_they_were_written(root, tmp_path):
    for name in ("mnist", "fashion_mnist"):
        data = load(config(name, root), seed=0, cache=str(tmp_path / "cache"))
        parts = [random_samples(1, 30, name), random_samples(2, 10, name)]
        assert np.array_equal(data.images, np.concatenate([x for x, _ in parts]))
        assert np.array_equal(data.labels, np.concatenate([y for _, y in parts]))
        assert np.array_equal(np.flatnonzero(data.official_test), np.arange(30, 40))


def test_characters_of_emnist_are_upright_which_have_rows_and_columns_exchanged_in_the_files(root):
    data = SOURCES["emnist"].read(root)
    written = np.concatenate([random_samples(seed, count, "emnist")[0] for seed, count in ((1, 30), (2, 10))])
    assert np.array_equal(data.images, written.transpose(0, 1, 3, 2))
    assert data.writers is None


def test_emnist_has_writers_where_they_are_given(root):
    labels = [random_samples(seed, count, "emnist")[1] for seed, count in ((1, 30), (2, 10))]
    who = {"train_writer": np.arange(30) // 5, "test_writer": np.arange(10) // 5}
    np.savez(root / "EMNIST" / "writers.npz", train_label=labels[0], test_label=labels[1], **who)
    writers = SOURCES["emnist"].read(root).writers
    assert writers is not None and writers.tolist() == [*who["train_writer"], *who["test_writer"]]


def test_emnist_is_looked_for_where_torchvision_puts_it(root, tmp_path, monkeypatch):
    reader = object.__new__(torchvision.datasets.EMNIST)
    reader.root, reader.split = str(root), "byclass"
    looked_for = []
    for reader.train in (True, False):
        looked_for += [Path(reader.images_file), Path(reader.labels_file)]
    assert SOURCES["emnist"].files(root) == looked_for
    calls = []
    monkeypatch.setattr(torchvision.datasets, "EMNIST", lambda *args, **named: calls.append((*args, named)))
    SOURCES["emnist"].fetch(tmp_path)
    assert calls == [(str(tmp_path), {"split": "byclass", "download": True})]


def test_cifar_pickles_come_out_as_they_were_written(root, tmp_path):
    for name, batches in (("cifar10", 6), ("cifar100", 2)):
        data = load(config(name, root), seed=0, cache=str(tmp_path / "cache"))
        parts = [random_samples(seed, 6, name) for seed in range(batches)]
        assert np.array_equal(data.images, np.concatenate([x for x, _ in parts]))
        assert np.array_equal(data.labels, np.concatenate([y for _, y in parts]))
        assert data.official_test.sum() == 6 and data.official_test[-6:].all()


def test_leaf_json_and_the_sample_file_agree(root, tmp_path):
    write_sample(tmp_path / "other" / "FEMNIST")
    leaf = load(config("femnist", root), seed=0, cache=str(tmp_path / "cache"))
    sample = load(config("femnist", tmp_path / "other"), seed=0, cache=str(tmp_path / "cache"))
    assert alike(leaf, sample)
    assert np.bincount(leaf.writers).tolist() == [4 + 4, 5, 6 + 5, 6], "f0001, f0002, f0003, f0099 in this order"


def test_leaf_folders_are_found_as_leaf_lays_them_out(tmp_path, root):
    write_leaf(tmp_path / "leaf" / "femnist" / "data")
    assert SOURCES["femnist"].read(tmp_path / "leaf").digest == SOURCES["femnist"].read(root).digest


@pytest.mark.parametrize(
    ("content", "reason"),  # texts of a file, or what is in it of a user
    [
        ({"x": [[0.0] * 783]}, "images of 783 values, not 784"),
        ({"x": [[0.0] * 784] * 2}, "2 images with 1 labels"),
        ({"x": [[255.0] * 784]}, "values outside 0..1"),
        ({"x": [[float("nan")] * 784]}, "values outside 0..1"),
        ({"x": None}, "images are no list"),
        ({"x": [["a"] * 784]}, "could not convert"),
        ({"x": [[0.5, [1]]]}, "inhomogeneous"),
        ({"y": ["a"]}, "labels are no numbers"),
        ({"y": [10**30]}, "labels are no numbers"),
        ({"y": [5.5]}, "labels must be whole numbers, and one is 5.5"),
        ({"y": [float("nan")]}, "labels must be whole numbers, and one is nan"),
        ({"y": [1e400]}, "labels must be whole numbers, and one is inf"),
        ({"y": [[3]]}, r"labels have shape \[1, 1\]"),
        ({"y": 3}, r"labels have shape \[\]"),
        ({"y": [62]}, r"labels 62\.\.62, allowed are 0\.\.61"),
        ({"y": [-1]}, r"labels -1\.\.-1"),
        pytest.param("[" * 100000, "recursion|Stack overflow", id="deep"),  # Python 3.14 has other words for it
        ("[]", "list indices"),
        ("5", "not subscriptable"),
        ('{"users": "f0001", "user_data": {}}', "`users` is no list of names"),
        ('{"users": [["a"]], "user_data": {}}', "`users` is no list of names"),
        ('{"users": ["a", "a"], "user_data": {"a": {"x": [], "y": []}}}', "a user is named twice"),
        ('{"users": ["a"], "user_data": {}}', "no 'a' in it"),
        ('{"users": ["a"], "user_data": {"a": []}}', "list indices"),
        ("\ud800", "cannot be read"),
    ],
)
def test_a_leaf_file_that_cannot_be_used_is_named(content, reason, root):
    path = root / "femnist" / "train" / "all_data_0.json"
    if isinstance(content, dict):
        user = {"x": [[0.0] * 784], "y": [3]} | content
        content = json.dumps({"users": ["f0001"], "user_data": {"f0001": user}})
    path.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(DataError, match=reason) as caught:
        SOURCES["femnist"].read(root)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_user_without_samples_in_a_part_is_nobody_there(root):
    before = SOURCES["femnist"].read(root)
    path = root / "femnist" / "train" / "all_data_0.json"
    content = json.loads(path.read_text())
    content["users"].append("f0099")
    content["user_data"]["f0099"] = {"x": [], "y": []}
    path.write_text(json.dumps(content))
    assert alike(SOURCES["femnist"].read(root), before)


def test_a_pipe_among_the_leaf_files_is_left_alone(root):
    before = SOURCES["femnist"].read(root)
    os.mkfifo(root / "femnist" / "train" / "all_data_7.json")
    assert alike(SOURCES["femnist"].read(root), before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": np.full(30, 5.5)}, "labels must be whole numbers, and one is 5.5"),
        ({"labels": np.full(30, "a")}, "labels are no numbers"),
        ({"labels": np.int64(3)}, "labels have shape []"),
        ({"labels": np.full(30, 62)}, "labels 62..62"),
        ({"test": np.full(30, 7)}, "official_test 7..7, allowed are 0..1"),
        ({"test": np.full(30, np.nan)}, "official_test must be whole numbers"),
        ({"writer": np.full(30, 0.5)}, "writers must be whole numbers"),
        ({"labels": np.full(29, 5)}, "30 images but 29 labels"),
        ({"images": np.zeros((30, 28, 28))}, "images are float64"),
        ({"images": np.zeros((0, 28, 28), np.uint8)}, "0 images but 30 labels"),
    ],
)
def test_a_sample_file_with_impossible_content_is_refused(change, reason, tmp_path):
    write_sample(tmp_path / "FEMNIST")
    path = tmp_path / "FEMNIST" / "femnist-sample.npz"
    with np.load(path) as archive:
        content = dict(archive) | change
    np.savez(path, **content)
    with pytest.raises(DataError) as caught:
        SOURCES["femnist"].read(tmp_path)
    assert str(path) in str(caught.value) and reason in str(caught.value)


def test_labels_stored_as_half_floats_are_labels():
    assert to_integers("labels", np.array([0, 5, 9], np.float16)).tolist() == [0, 5, 9]
    with pytest.raises(ValueError, match="one is inf"):
        to_integers("labels", np.array([0, np.inf], np.float16))


def test_the_bytes_of_a_damaged_archive_are_not_printed(tmp_path):
    write_sample(tmp_path / "FEMNIST")
    path = tmp_path / "FEMNIST" / "femnist-sample.npz"
    content = bytearray(path.read_bytes())
    content[26:28] = b"\x00\xf0"  # the length of the first name, which zipfile prints
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read") as caught:
        SOURCES["femnist"].read(tmp_path)
    assert len(str(caught.value)) < 1000


def test_labels_stored_as_whole_floats_are_labels(tmp_path):
    write_sample(tmp_path / "FEMNIST")
    before = SOURCES["femnist"].read(tmp_path)
    path = tmp_path / "FEMNIST" / "femnist-sample.npz"
    with np.load(path) as archive:
        content = dict(archive)
    np.savez(path, **content | {name: content[name].astype(np.float64) for name in ("labels", "test", "writer")})
    assert alike(SOURCES["femnist"].read(tmp_path), before)


def test_no_more_is_unpacked_than_the_head_of_an_idx_file_says(root):
    path = root / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz"
    good = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(good) + gzip.compress(bytes(1 << 28), 9))  # 256 MiB in 256 KiB
    tracemalloc.start()
    with pytest.raises(DataError, match="its head says 30 values, and it has more"):
        SOURCES["mnist"].read(root)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("part", "content", "reason"),
    [
        (
            "labels-idx1",
            bytes([0, 0, 8, 1]) + b"\xff" * 4 + bytes(9),
            "unpacks to 4 GiB|its head says 4294967295 values",
        ),
        ("labels-idx1", bytes([0, 0, 8, 1, 0, 0]), "unpack requires"),
        ("labels-idx1", bytes([0, 0, 9, 1, 0, 0, 0, 1, 0]), "no idx file of unsigned bytes"),
        ("labels-idx1", bytes([0, 0, 8, 3, 0, 0, 0, 1]) + bytes(9), "no idx file of unsigned bytes with 1 dim"),
        ("labels-idx1", b"", "begins with b''"),
        ("labels-idx1", idx_bytes(np.full(30, 10, np.uint8)), r"label 10, allowed are 0\.\.9"),
        (
            "images-idx3",
            bytes([0, 0, 8, 3]) + b"\xff" * 12 + bytes(99),
            "unpacks to .* TiB, and this node has .* of mem",
        ),
    ],
)
def test_an_idx_file_that_cannot_be_used_is_named(part, content, reason, root):
    path = root / "FashionMNIST" / "raw" / f"train-{part}-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        SOURCES["fashion_mnist"].read(root)
    assert str(path) in str(caught.value)


def test_an_array_longer_than_its_head_says_is_refused(tmp_path):
    write_sample(tmp_path / "FEMNIST")
    path = tmp_path / "FEMNIST" / "femnist-sample.npz"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["labels.npy"] += bytes(1 << 26)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(DataError, match=r"the array 'labels' has .* bytes, and its head says"):
        SOURCES["femnist"].read(tmp_path)


def test_half_of_leaf_is_refused(root):
    for path in (root / "femnist" / "test").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"test/\*\.json is missing"):
        SOURCES["femnist"].read(root)


def test_mnist_knows_its_writers_if_the_file_exists(root):
    assert SOURCES["mnist"].read(root).writers is None
    _, train = random_samples(1, 30, "mnist")
    _, test = random_samples(2, 10, "mnist")
    who = {"train_writer": np.arange(30) // 3, "test_writer": 90 + np.arange(10) // 5}
    path = root / "MNIST" / "writers.npz"
    np.savez(path, train_label=train, test_label=test, **who)
    writers = SOURCES["mnist"].read(root).writers
    assert writers is not None and writers.tolist() == [*who["train_writer"], *who["test_writer"]]
    np.savez(path, train_label=train[::-1], test_label=test, **who)
    with pytest.raises(DataError, match=r"writers\.npz describes other samples"):
        SOURCES["mnist"].read(root)
    np.savez(path, train_label=train, test_label=test)
    with pytest.raises(DataError, match=r"writers\.npz cannot be read \(no array 'train_writer' in it\)"):
        SOURCES["mnist"].read(root)


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "flipped"])
def test_a_damaged_sample_file_is_named(damage, tmp_path):
    write_sample(tmp_path / "FEMNIST")
    path = tmp_path / "FEMNIST" / "femnist-sample.npz"
    good = path.read_bytes()
    flipped = good[:3000] + bytes([good[3000] ^ 255]) + good[3001:]
    path.write_bytes({"truncated": good[:-100], "overwritten": b"something else", "flipped": flipped}[damage])
    with pytest.raises(DataError) as caught:
        SOURCES["femnist"].read(tmp_path)
    assert f"{path} cannot be read (" in str(caught.value)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files and writes no log."""

    def log_message(self, *_: object) -> None: ...


def test_torchvision_downloads_what_is_missing(root, tmp_path, monkeypatch):
    raw = root / "MNIST" / "raw"
    names = [name for name, _ in torchvision.datasets.MNIST.resources]
    sums = [(name, hashlib.md5((raw / name).read_bytes()).hexdigest()) for name in names]
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", sums)
    handler = functools.partial(QuietHandler, directory=str(raw))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        fetched = load(config("mnist", tmp_path / "new", download=True), seed=0, cache=str(tmp_path / "cache"))
        server.shutdown()
    assert alike(fetched, SOURCES["mnist"].read(root))


def test_the_data_folder_comes_from_the_configuration_or_the_environment(root, tmp_path, monkeypatch):
    expected = SOURCES["mnist"].read(root).digest
    monkeypatch.setenv("PFLMPI_DATA", str(root))
    assert load(DataConfig(name="mnist"), seed=0, cache=str(tmp_path / "cache")).digest == expected
    monkeypatch.setenv("PFLMPI_DATA", str(tmp_path / "elsewhere"))
    assert load(config("mnist", root), seed=0, cache=str(tmp_path / "cache")).digest == expected


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
