"""The clients and their data: what every federation keeps, and its file."""

import dataclasses
import hashlib
import logging
import os
import zipfile

import numpy as np
import pytest

from pflmpi.config.load import partition
from pflmpi.data import load
from pflmpi.data.config import DataConfig, PartitionConfig
from pflmpi.data.dataset import assemble
from pflmpi.data.federation import Federation, _compute_digest, build, save
from pflmpi.data.loading import limit_samples
from pflmpi.data.partitions import PARTITIONS
from pflmpi.data.unseen import hold_out_clients
from pflmpi.errors import DataError
from pflmpi.rng import stream

SECTIONS = {
    "pathological": {"clients": 8, "classes_per_client": 2},
    "dirichlet": {"clients": 8, "beta": 0.5},
    "exdir": {"clients": 8, "classes_per_client": 2, "alpha": 1.0},
    "nway_kshot": {"clients": 8, "n": 3, "k": 12},
    "lognormal": {"clients": 8, "classes_per_client": 2, "sigma": 1.0},
    "iid": {"clients": 8},
    "writers": {},
}


def toy(samples=400, classes=4, tests=100, writers=10):
    """Return samples of all classes by all writers in turn; the last `tests` are official test samples."""
    number = np.arange(samples)
    images = (number % 251).astype(np.uint8).reshape(-1, 1, 1, 1)
    return assemble("toy", images, number % classes, number >= samples - tests, classes, number // classes % writers)


def federation(name="exdir", split="pooled", seed=0, dataset=None):
    data = DataConfig.model_validate({"name": "toy", "split": split})
    return build(dataset or toy(), partition({"name": name, **SECTIONS[name]}), data, seed)


def reuse(dataset, path):
    return build(dataset, PartitionConfig(path=str(path)), DataConfig(name="toy"), seed=99)


def rng(seed=0):
    return np.random.Generator(np.random.Philox(key=seed))


def same(a, b):
    pairs = [*zip(a.train, b.train, strict=True), *zip(a.test, b.test, strict=True)]
    return a.digest == b.digest and all(np.array_equal(x, y) for x, y in pairs)


# --- every partition, both splits ---------------------------------------------------------------------------


every_partition = pytest.mark.parametrize("name", list(PARTITIONS))
both_splits = pytest.mark.parametrize("split", ["pooled", "official"])


@every_partition
@both_splits
def test_training_and_test_samples_are_disjoint_and_ascending(name, split):
    client_data = federation(name, split)
    parts = [*client_data.train, *client_data.test]
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert all(len(part) for part in parts), "everyone trains and is tested"
    total = np.concatenate(parts)
    assert len(np.unique(total)) == len(total) - client_data.num_shared
    if name != "nway_kshot":
        assert np.array_equal(np.sort(total), np.arange(400))
    if split == "official":
        assert np.concatenate(client_data.train).max() < 300 <= np.concatenate(client_data.test).min()


@every_partition
@both_splits
def test_a_federation_depends_on_its_seed_alone(name, split):
    first = federation(name, split, seed=1)
    np.random.default_rng(9).random(5)
    assert same(first, federation(name, split, seed=1))
    if (name, split) != ("writers", "official"):  # nothing is drawn there
        assert first.digest != federation(name, split, seed=2).digest


@every_partition
def test_counts_are_those_of_the_training_samples(name):
    client_data = federation(name)
    labels = client_data.dataset.labels
    assert client_data.num_clients == len(client_data.train) == len(client_data.test)
    assert (
        client_data.num_train.tolist()
        == [len(part) for part in client_data.train]
        == client_data.class_counts.sum(axis=1).tolist()
    )
    assert client_data.num_test.tolist() == [len(part) for part in client_data.test]
    assert client_data.class_counts.dtype == np.int64 and client_data.class_counts.shape == (client_data.num_clients, 4)
    assert client_data.class_counts[3, 1] == (labels[client_data.train[3]] == 1).sum()


def test_only_the_named_streams_are_drawn_from(monkeypatch):
    drawn = []

    def watched(*key):
        drawn.append(key)
        return stream(*key)

    def all_watched(seed, round, clients, purpose):
        return (watched(seed, round, client, purpose) for client in clients)

    monkeypatch.setattr("pflmpi.data.federation.stream", watched)
    monkeypatch.setattr("pflmpi.data.federation.streams", all_watched)
    federation(seed=7)
    assert drawn == [(7, 0, -1, "partition"), *((7, 0, client, "split") for client in range(8))]
    drawn.clear()
    federation(seed=7, split="official")
    assert drawn == [(7, 0, -1, "partition")]


def test_the_digest_covers_the_data_and_all_indices():
    client_data = federation()
    digest = hashlib.sha256(f"dataset {client_data.dataset.digest}\n".encode())
    for kind, parts in (("train", client_data.train), ("test", client_data.test)):
        for client, part in enumerate(parts):
            digest.update(f"{kind} {client} {len(part)}\n".encode() + part.astype("<i8").tobytes())
    assert client_data.digest == digest.hexdigest()


# --- writers ------------------------------------------------------------------------------------------------


def written(writers, tests):
    images = np.zeros((len(writers), 1, 1, 1), dtype=np.uint8)
    return assemble("toy", images, np.arange(len(writers)) % 2, np.array(tests), 2, np.array(writers))


def test_writers_with_test_samples_only_are_clients_of_the_pool_and_not_of_the_official_split():
    data = written([5, 5, 5, 5, 8, 8, 8, 8, 9, 9], [False, False, False, True] * 2 + [True, True])
    pooled = federation("writers", "pooled", dataset=data)
    assert pooled.num_clients == 3 and pooled.num_train.tolist() == [3, 3, 1] and pooled.num_test.tolist() == [1, 1, 1]
    official = federation("writers", "official", dataset=data)
    assert [part.tolist() for part in official.train] == [[0, 1, 2], [4, 5, 6]]
    assert [part.tolist() for part in official.test] == [[3], [7]]


def test_an_official_split_between_writers_is_refused():
    data = written([1, 1, 2, 2, 3, 3], [False] * 4 + [True] * 2)
    with pytest.raises(DataError, match=r"none of its 2 official test samples matches them; set data\.split: pooled"):
        federation("writers", "official", dataset=data)


def test_data_without_writers_has_no_partition_by_writers():
    data = load(DataConfig(name="digits"), seed=0)
    with pytest.raises(
        DataError, match=r"partition 'writers' needs the writer .* dataset 'digits' does not have; use femnist"
    ):
        federation("writers", dataset=data)


def test_the_real_femnist_sample_gives_natural_federations(data_root, tmp_path):
    data = load(DataConfig(name="femnist", root=str(data_root)), seed=0, cache=tmp_path)
    pooled, official = (federation("writers", split, dataset=data) for split in ("pooled", "official"))
    assert pooled.num_clients == 184 and pooled.num_train.min() >= 1
    assert official.num_clients == 105 and official.num_train.sum() == 14708 and official.num_test.sum() == 1685


# --- sharing ------------------------------------------------------------------------------------------------


def test_shared_samples_are_counted(caplog):
    assert federation("exdir").num_shared == 0 and not caplog.text
    section = {"name": "nway_kshot", "clients": 3, "n": 4, "k": 90, "stdev": 0, "noise": 0}
    client_data = build(toy(), partition(section), DataConfig(name="toy"), 0)
    places = np.bincount(np.concatenate([*client_data.train, *client_data.test]), minlength=400)
    assert client_data.num_shared == (places > 1).sum() < places.sum() - 400, "some samples are with all three"
    overlap = len({*np.concatenate(client_data.train).tolist()} & {*np.concatenate(client_data.test).tolist()})
    assert (
        f"{client_data.num_shared} samples are with more than one client; {overlap} of them are trained on by one"
        in caplog.text
    )


@pytest.mark.parametrize(
    "returned, expected",
    [
        ("[np.array([0, 1]), np.array([7, 3, 7, 9, 9, 7])]", "gives 2 samples to client 1 more than once, such as "
         "index 7; a client may have each sample once"),
        ("[(np.arange(4), np.arange(4, 6)), (np.arange(9), np.arange(8, 10))]", "gives 1 sample to client 1 more "
         "than once, such as index 8; a client"),
        ("[(np.arange(4), np.array([5, 5]))]", ".* such as index 5; a client"),
    ],
)  # fmt: skip
def test_a_client_that_has_a_sample_twice_is_refused_by_number_and_index(returned, expected, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"import numpy as np\n\n\ndef twice(labels, clients, rng):\n    return {returned}\n")
    with pytest.raises(DataError, match=f"partition .*mine.py:twice' {expected}"):
        build(toy(), PartitionConfig(f"{file}:twice"), DataConfig(name="toy", split="pooled"), 0)


def test_a_saved_partition_that_tests_on_what_it_trains_on_is_refused(tmp_path):
    client_data = federation()
    train, test = list(client_data.train), list(client_data.test)
    test[2] = train[2][:5]
    digest = _compute_digest(client_data.dataset, train, test, ())
    save(dataclasses.replace(client_data, test=tuple(test), digest=digest), tmp_path / "p.npz")
    with pytest.raises(
        DataError, match=rf"p.npz gives 5 samples to client 2 more than once, such as index {test[2][0]}"
    ):
        reuse(client_data.dataset, tmp_path / "p.npz")


# --- saved and used again -----------------------------------------------------------------------------------


@every_partition
def test_a_saved_federation_comes_back_the_same(name, tmp_path):
    client_data = federation(name)
    save(client_data, tmp_path / "new folder" / "parts.npz")
    again = reuse(client_data.dataset, tmp_path / "new folder" / "parts.npz")
    assert same(again, client_data) and np.array_equal(again.class_counts, client_data.class_counts)
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["parts.npz"], "no temporary file is left"


def test_a_federation_made_for_other_data_is_refused_with_both_digests(tmp_path):
    client_data, other_data = federation(), toy(samples=401)
    save(client_data, tmp_path / "parts.npz")
    with pytest.raises(DataError) as caught:
        reuse(other_data, tmp_path / "parts.npz")
    assert client_data.dataset.digest in str(caught.value) and other_data.digest in str(caught.value)


def rewrite(path, **changes):
    with np.load(path) as file:
        content = {key: file[key] for key in file}
    np.savez(path, **content | changes)


def test_a_damaged_file_is_refused(tmp_path):
    client_data, path = federation(), tmp_path / "parts.npz"
    save(client_data, path)
    good = path.read_bytes()
    for damaged in (good[: len(good) // 2], b"", b"no archive at all", good.replace(b"PK\x03\x04", b"PK\x03\x05")):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"parts\.npz cannot be read"):
            reuse(client_data.dataset, path)
    path.write_bytes(good)
    swapped = [np.concatenate([client_data.train[0][::-1], *client_data.train[1:]])]
    beyond = [
        np.concatenate([client_data.train[0][:-1], [10**6], *client_data.train[1:]]),
        np.full(len(swapped[0]), -1),
    ]
    for train in (*swapped, *beyond):
        path.write_bytes(good)
        rewrite(path, train=train)
        with pytest.raises(DataError, match=r"parts\.npz is damaged"):
            reuse(client_data.dataset, path)
    path.write_bytes(good)
    rewrite(path, num_train=np.array([3]))
    with pytest.raises(DataError, match="its arrays do not belong together"):
        reuse(client_data.dataset, path)
    with pytest.raises(DataError, match="does not exist"):
        reuse(client_data.dataset, tmp_path / "nothing.npz")


def test_a_file_with_pickles_is_not_opened(tmp_path):
    client_data, path = federation(), tmp_path / "parts.npz"
    save(client_data, path)
    with zipfile.ZipFile(path) as archive:
        assert all(b"'|O'" not in archive.read(name)[:128] for name in archive.namelist())
    rewrite(path, digest=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match=r"parts\.npz cannot be read \(the array 'digest' is pickled"):
        reuse(client_data.dataset, path)


def test_a_full_disk_leaves_the_old_file_alone(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "parts.npz"
    save(federation(seed=1), path)
    good = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"parts\.npz cannot be written .*No space left"):
        save(federation(seed=2), path)
    assert path.read_bytes() == good and list(tmp_path.iterdir()) == [path]


def test_clients_that_cannot_be_tested_are_counted_in_the_log(caplog):
    with caplog.at_level(logging.WARNING):
        client_data = federation("exdir", "official", dataset=toy(tests=4))
    empty = int((client_data.num_test == 0).sum())
    assert empty >= 4 and f"{empty} of 8 clients have no test samples" in caplog.text


def own(dataset, split="auto", name="iid", **partitioned):
    """The federation of a file of one's own."""
    data = DataConfig.model_validate({"name": "toy", "path": "toy.npz", "split": split})
    return build(dataset, partition({"name": name, **partitioned}), data, 0)


def test_marked_test_samples_of_own_data_are_not_trained_on():
    for clients in (1, 3):
        client_data = own(toy(), clients=clients)
        assert same(client_data, own(toy(), "official", clients=clients))
        assert sum(client_data.num_test) == 100 and np.concatenate(client_data.train).max() < 300
    assert same(own(toy(tests=0), clients=3), own(toy(tests=0), "pooled", clients=3)), "as before without marks"
    pooled, default = DataConfig(name="mnist", split="pooled"), DataConfig(name="mnist")
    three = partition({"name": "iid", "clients": 3})
    assert same(build(toy(), three, default, 0), build(toy(), three, pooled, 0)), "as before for a known dataset"


def test_data_of_test_samples_alone_is_refused():
    with pytest.raises(DataError, match="all 400 samples of dataset 'toy' are test samples, and none is left to train"):
        own(toy(tests=400), clients=3)


@pytest.mark.parametrize("limit", [False, True])
def test_no_client_gets_the_number_of_another_that_is_left_out(limit):
    writers = np.arange(12) // 4
    test = np.zeros(12, bool) if limit else writers == 1  # client b has nothing to train on
    data = assemble("toy", np.ones((12, 2), np.float32), np.arange(12) % 2, test, 2, writers)
    data = dataclasses.replace(data, written_clients=("a", "b", "c"))
    if limit:
        data = limit_samples(data, 2, rng())
    with pytest.raises(
        DataError, match=r"no training samples of client .*, and without it the others would be numbered"
    ):
        own(data, name="writers")


@pytest.mark.parametrize(
    "parts, names",
    [
        ([[4, 5], [0, 1]], ("b", "a")),
        ([[0, 1, 4], [5]], ()),  # of two clients of the data
        ([[0], [1, 2]], ()),  # of one
    ],
)
def test_clients_have_names_where_each_is_one_of_the_data(parts, names):
    data = assemble("toy", np.ones((8, 2), np.float32), np.arange(8) % 2, np.zeros(8, bool), 2, np.arange(8) // 4)
    train, no_test = tuple(map(np.array, parts)), (np.zeros(0, np.int64),) * 2
    for written_clients, expected in ((("a", "b"), names), ((), ())):
        named = dataclasses.replace(data, written_clients=written_clients)
        assert Federation(named, train, no_test, "", np.zeros((2, 2), np.int64)).client_names == expected


def test_where_no_client_has_a_test_sample_it_is_refused(tmp_path):
    single = assemble("toy", np.ones((3, 2), np.float32), np.arange(3), np.zeros(3, bool), 3)
    with pytest.raises(DataError, match="none of the 3 clients of dataset 'toy' has a test sample; give them two"):
        own(single, clients=3)
    halves = assemble("toy", np.ones((3, 2), np.float32), np.arange(3) % 2, np.zeros(3, bool), 2, np.array([0, 0, 1]))
    with pytest.raises(DataError, match=r"none of the 1 (trained|unseen) clients has a test sample"):
        hold_out_clients(own(halves, name="writers"), 0.5, rng())


def test_test_samples_of_classes_that_nobody_trains_on_are_counted(caplog):
    labels, test = np.array([0, 1] * 6 + [2, 0, 1]), np.arange(15) >= 12
    with caplog.at_level(logging.WARNING):
        own(assemble("toy", np.ones((15, 2), np.float32), labels, test, 3), clients=2)
    assert "1 of 3 test samples are left out: no client trains on their class" in caplog.text


def test_test_samples_that_clients_have_of_classes_that_nobody_trains_on_are_counted(caplog):
    labels, tested = np.array([0, 1, 2, 0, 1, 2]), np.array([False, False, True] * 2)
    data = assemble("toy", np.ones((6, 2), np.float32), labels, tested, 3, np.array([0, 0, 0, 1, 1, 1]))
    client_data = own(data, "official", "writers")
    assert (
        client_data.num_test.tolist() == [1, 1]
        and "2 test samples are of classes that no client trains on" in caplog.text
    )
    caplog.clear()
    own(dataclasses.replace(data, labels=np.array([0, 1, 0, 0, 1, 1])), "official", "writers")
    assert not caplog.text


def test_data_without_official_test_samples_is_refused():
    with pytest.raises(DataError, match=r"official leaves all 8 clients of dataset 'toy'.*set data\.split: pooled"):
        federation("exdir", "official", dataset=toy(tests=0))


def test_keys_that_a_saved_partition_decides_are_said_to_have_no_effect(tmp_path, caplog):
    save(federation(), path := tmp_path / "parts.npz")
    saved = PartitionConfig(path=str(path))
    with caplog.at_level(logging.WARNING):
        build(toy(), saved, DataConfig(name="toy", split="official"), 0)
    (message,) = caplog.messages
    assert "samples are trained on that dataset 'toy' marks as test samples" in message
    with caplog.at_level(logging.WARNING):
        build(toy(), saved, DataConfig(name="toy", test_share=0.4, test_per_class=2), 0)
    for key in ("test_share", "test_per_class"):
        assert f"data.{key} has no effect: {path} says which samples of a client are for testing" in caplog.text


def test_a_share_of_test_samples_beside_marked_ones_is_said_to_have_no_effect(caplog):
    exdir = partition({"name": "exdir", **SECTIONS["exdir"]})
    with caplog.at_level(logging.WARNING):
        build(toy(), exdir, DataConfig(name="toy", split="official", test_share=0.4), 0)
    assert caplog.text.count("data.test_share has no effect: data.split: official with the marks of dataset 'toy'") == 1
    caplog.clear()
    build(toy(), exdir, DataConfig(name="toy", split="official"), 0)
    build(toy(), exdir, DataConfig(name="toy", split="pooled", test_share=0.4), 0)
    assert "no effect" not in caplog.text


def test_a_config_of_a_saved_partition_is_not_mistaken_for_a_named_one(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        build(toy(), PartitionConfig(path=str(tmp_path / "none.npz")), DataConfig(name="toy"), 0)


PFLLIB = {"name": "pathological", "clients": 8, "classes_per_client": 2, "pairing": "contiguous", "draw": "pfllib"}


def test_a_partition_may_split_the_samples_of_each_client_itself_whatever_the_seed_of_the_run():
    dataset = toy()
    first, second = (build(dataset, partition(PFLLIB), DataConfig(name="toy", split="pooled"), seed) for seed in (0, 5))
    assert same(first, second)
    shares = PARTITIONS["pathological"](dataset.labels, 8, rng(), **partition(PFLLIB).parameters)
    for train, test, share in zip(first.train, first.test, shares, strict=True):
        assert np.array_equal(train, share[0]) and np.array_equal(test, share[1])
    assert first.num_shared == 0 and first.num_train.sum() + first.num_test.sum() == 400


@pytest.mark.parametrize("key, value", [("split", "official"), ("test_share", 0.5)])
def test_a_split_of_the_configuration_beside_that_of_the_partition_is_refused(key, value):
    data = DataConfig(name="toy", **{"split": "pooled", key: value})
    wanted = f"partition 'pathological' splits .* itself, but .*data.{key} = {value}.* set pooled and 0.25"
    with pytest.raises(DataError, match=wanted):
        build(toy(), partition(PFLLIB), data, 0)


@pytest.mark.parametrize("name, split", [("iid", "pooled"), ("writers", "official")])
def test_numbers_of_test_samples_by_class_need_the_official_split_by_label(name, split):
    data = DataConfig(name="toy", split=split, test_per_class=2)
    with pytest.raises(
        DataError, match=r"data.test_per_class = 2 .* set data.split: official, with a partition by label"
    ):
        build(toy(), partition({"name": name, **SECTIONS[name]}), data, 0)
    shared = build(
        toy(), partition({"name": "iid", "clients": 3}), DataConfig(name="toy", split="official", test_per_class=2), 0
    )
    assert (shared.test_class_counts == 2).all()


# --- validation samples -------------------------------------------------------------------------------------


@every_partition
@both_splits
def test_validation_samples_come_out_of_the_training_samples_alone(name, split):
    dataset, section = toy(), partition({"name": name, **SECTIONS[name]})
    without, held_out = (
        build(dataset, section, DataConfig(name="toy", split=split, validation=share), 0) for share in (0.0, 0.3)
    )
    assert not without.validation and without.digest != held_out.digest
    assert all(map(np.array_equal, without.test, held_out.test))
    for before, train, validation in zip(without.train, held_out.train, held_out.validation, strict=True):
        assert len(validation) == np.floor(0.3 * len(before) + 0.5)
        assert np.array_equal(before, np.sort(np.concatenate([train, validation])))
        assert (np.diff(train) > 0).all() and (np.diff(validation) > 0).all()
    assert np.array_equal(held_out.class_counts.sum(1), held_out.num_train)


def test_validation_samples_follow_from_the_seed():
    section, data = partition({"name": "iid", "clients": 4}), DataConfig(name="toy", split="pooled", validation=0.5)
    first, again = (build(toy(), section, data, 7) for _ in range(2))
    assert same(first, again) and all(map(np.array_equal, first.validation, again.validation))
    assert not all(map(np.array_equal, first.validation, build(toy(), section, data, 8).validation))


def of_sizes(*sizes):
    """Data of as many clients, the writers, of whom the last half of each's samples is for testing."""
    writers = np.repeat(np.arange(len(sizes)), sizes)
    tests = np.concatenate([np.arange(size) >= -(-size // 2) for size in sizes])
    images = np.arange(len(writers), dtype=np.uint8).reshape(-1, 1, 1, 1)
    return assemble("sized", images, writers % 2, tests, 2, writers)


def test_a_share_that_leaves_a_client_nothing_to_train_on_is_refused_with_its_number():
    data = DataConfig(name="sized", split="official", validation=0.6)
    with pytest.raises(DataError, match=r"data.validation = 0.6 takes all 1 training samples of client 2 for valid"):
        build(of_sizes(40, 20, 2), partition({"name": "writers"}), data, 0)


def test_clients_without_validation_samples_are_counted(caplog):
    data = DataConfig(name="sized", split="official", validation=0.1)
    client_data = build(of_sizes(40, 20, 8, 6), partition({"name": "writers"}), data, 0)
    assert client_data.num_validation.tolist() == [2, 1, 0, 0]
    assert "2 of 4 clients have no validation samples" in caplog.text
    with pytest.raises(DataError, match="none of the 2 clients of dataset 'sized' has a validation sample; raise data"):
        build(of_sizes(8, 6), partition({"name": "writers"}), data, 0)


def test_samples_that_the_data_marks_validate_and_no_others(tmp_path):
    marks = np.arange(400) % 5 == 0
    marks[300:] = False  # these are test samples
    plain = toy()
    arrays = plain.images, plain.labels, plain.official_test, 4, plain.writers
    marked = assemble("toy", *arrays, official_validation=marks)
    assert marked.digest != plain.digest
    assert limit_samples(marked, 100, rng()).official_validation.sum() in range(10, 30)
    section = partition({"name": "iid", "clients": 4})
    client_data = build(marked, section, DataConfig(name="toy", split="official"), 0)
    assert np.array_equal(np.sort(np.concatenate(client_data.validation)), np.flatnonzero(marks))
    assert not marks[np.concatenate(client_data.train)].any()
    assert not build(marked, section, DataConfig(name="toy", split="pooled"), 0).validation
    config = DataConfig(name="toy", split="official", validation=0.1)
    with pytest.raises(DataError, match=r"data.validation = 0.1, but dataset 'toy' marks validation samples already"):
        build(marked, section, config, 0)


def test_marks_of_the_data_do_not_change_a_saved_partition(tmp_path, caplog):
    marked = dataclasses.replace(toy(), official_validation=np.arange(400) % 5 == 0)
    save(saved := federation("iid", dataset=marked), path := tmp_path / "parts.npz")
    again = build(marked, PartitionConfig(path=str(path)), DataConfig(name="toy", path="toy.npz"), 0)
    assert same(saved, again) and not again.validation
    trained = sum((samples >= 300).sum() for samples in saved.train)  # which are test samples
    assert f"{trained} samples are trained on that dataset 'toy' marks as test samples: partition {path}" in caplog.text
    caplog.clear()
    build(marked, PartitionConfig(path=str(path)), DataConfig(name="toy", path="toy.npz", split="pooled"), 0)
    assert not caplog.text


def test_a_federation_with_validation_samples_is_made_once(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("pflmpi.data.federation.Federation", lambda *fields: made.append(1) or Federation(*fields))
    data = DataConfig(name="toy", split="pooled", validation=0.25)
    save(build(toy(), partition({"name": "iid", **SECTIONS["iid"]}), data, 0), tmp_path / "parts.npz")
    reuse(toy(), tmp_path / "parts.npz")
    assert len(made) == 2


def test_a_saved_partition_keeps_its_validation_samples(tmp_path):
    path, dataset = tmp_path / "p.npz", toy()
    data = DataConfig(name="toy", split="pooled", validation=0.25)
    first = build(dataset, partition({"name": "iid", "clients": 4}), data, 0)
    save(first, path)
    again = build(dataset, PartitionConfig(path=str(path)), DataConfig(name="toy"), 9)
    assert same(first, again) and all(map(np.array_equal, first.validation, again.validation))
    with pytest.raises(DataError, match=r"data.validation = 0.25, but partition .* has validation samples already"):
        build(dataset, PartitionConfig(path=str(path)), data, 0)
    save(federation("iid"), path)  # drawn for one that was saved without any
    drawn = build(dataset, PartitionConfig(path=str(path)), data, 0)
    assert drawn.num_validation.sum() == pytest.approx(0.25 * federation("iid").num_train.sum(), abs=4)
