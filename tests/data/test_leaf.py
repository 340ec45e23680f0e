"""LEAF's folders as data of one's own: users are clients, texts become numbers, and what is damaged is named."""

import json

import numpy as np
import pytest

from pflmpi.cli import main
from pflmpi.data.own_files import read_own
from pflmpi.errors import DataError
from raw_files import leaf_samples, write_leaf, write_leaf_texts


def write(folder, **sides):
    """Write a file for each `side_name`, of users with (x, y)."""
    for name, users in sides.items():
        side, _, part = name.partition("_")
        (folder / side).mkdir(parents=True, exist_ok=True)
        data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
        content = {"users": [*users], "num_samples": [len(y) for _, y in users.values()], "user_data": data}
        (folder / side / f"all_data{part}.json").write_text(json.dumps(content))
    return folder


def test_users_are_clients_with_their_samples_of_all_files(tmp_path, capsys):
    write_leaf(tmp_path)
    dataset, x, y, names = read_own(tmp_path), [], [], []
    for users in leaf_samples().values():
        for user, (images, labels) in users.items():
            x.append(images.reshape(-1, 784) / 255)
            y += labels.tolist()
            names += [user] * len(labels)
    assert np.array_equal(dataset.images, np.concatenate(x).astype(np.float32))
    assert [int(dataset.written_labels[label]) for label in dataset.labels] == y
    assert dataset.written_clients == ("f0001", "f0002", "f0003", "f0099")
    assert [dataset.written_clients[writer] for writer in dataset.writers] == names
    assert dataset.official_test.tolist() == [False] * 15 + [True] * 15
    assert main(["data", str(tmp_path)]) == 0
    assert "clients  4, 5 to 11 samples each; use partition: {name: writers}" in capsys.readouterr().out


def test_a_user_who_is_only_tested_is_refused_until_samples_are_pooled(tmp_path, capfd):
    write(tmp_path / "leaf", train={"a": ([[0.0], [1.0]], [0, 1])}, test={"b": ([[2.0], [3.0]], [1, 0])})
    (tmp_path / "run.yaml").write_text("data: {path: leaf}\npartition: {name: writers}\nalgorithm: local\nmodel: mlp\n")
    assert main(["data", str(tmp_path / "run.yaml")]) == 2
    error = capfd.readouterr().err
    assert "no training samples of client b" in error and "or set data.split: pooled" in error
    assert "data.limit" not in error
    assert main(["data", str(tmp_path / "run.yaml"), "-s", "data.limit=3"]) == 2
    assert "set data.split: pooled, or raise data.limit" in capfd.readouterr().err
    assert main(["data", str(tmp_path / "run.yaml"), "-s", "data.split=pooled"]) == 0


def test_next_characters_of_texts_are_classes_and_their_characters_numbers(tmp_path):
    folder = write(tmp_path, train={"KING": (["ab", "b "], ["c", "a"])}, test={"FOOL": (["a", "é"], ["b", "b"])})
    dataset = read_own(folder)
    assert dataset.images.tolist() == [[2, 3], [3, 1], [2, 0], [4, 0]]  # " " is 1, "a" 2, "b" 3, "é" 4; 0 is padding
    assert dataset.class_names == ("a", "b", "c") and dataset.labels.tolist() == [2, 0, 1, 1]
    assert dataset.written_clients == ("FOOL", "KING")


def test_a_space_may_be_the_next_character(tmp_path):
    write_leaf_texts(tmp_path, train={"KING": "the end of it", "FOOL": "so be it\n"})
    dataset = read_own(tmp_path)
    assert dataset.class_names[:3] == ("'\\n'", "' '", "d") and dataset.written_labels[:3] == ("\n", " ", "d")
    assert [dataset.written_labels[label] for label in dataset.labels] == [*"end of it", *"e it\n"]


GOOD = {"a": ([[0.0, 1.0]], [0])}
BAD = [
    ({"b": (["text"], ["x"])}, r"has samples and labels <U4 \[\] and <U1, the first float32 \[2\] and int64"),
    ({"b": ([[1.0]], [0])}, r"has samples and labels float32 \[1\] and int64, the first"),
    ({"b": ([[1.0, 2.0]], [0, 1])}, "has 1 samples and 2 labels"),
    ({"b": ([[1.0, 2.0], [1.0]], [0, 1])}, "user 'b': it has lists of unlike length; expected numbers, or texts"),
    ({"b": ([[1.0, None]], [0])}, "user 'b': it holds object; expected numbers, or texts"),
    ({"b": ([[1.0, 10**30]], [10**30])}, "user 'b': it holds object; expected numbers, or texts"),
]


@pytest.mark.parametrize("users, expected", BAD, ids=range(len(BAD)))
def test_samples_that_cannot_be_used_are_named_with_their_file(users, expected, tmp_path):
    write(tmp_path, train=GOOD, test_1=users)
    with pytest.raises(DataError, match=f"data.path = .*/test/all_data1.json:? .*{expected}") as caught:
        read_own(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("x, y", [(["cat.jpg"], [0]), ([["1", "a text"]], ["x"])])
def test_texts_that_do_not_go_on_are_refused(x, y, tmp_path):
    with pytest.raises(DataError, match="expected numbers, or a text and as label another"):
        read_own(write(tmp_path, train={"a": (x, y)}))


def test_labels_keep_their_digits(tmp_path):
    dataset = read_own(write(tmp_path, train={"a": ([[0.5], [1.5]], [2.0**24, 2.0**24 + 1])}))
    assert dataset.written_labels == ("16777216", "16777217") and dataset.images.tolist() == [[0.5], [1.5]]


def test_a_file_that_is_cut_short_or_empty_is_named(tmp_path):
    file = write(tmp_path, train=GOOD) / "train" / "all_data.json"
    file.write_text(file.read_text()[:-9])
    with pytest.raises(DataError, match=r"train/all_data\.json: Unterminated string"):
        read_own(tmp_path)
    write(tmp_path, train={"a": ([], [])})
    with pytest.raises(DataError, match="it has no samples"):
        read_own(tmp_path)
