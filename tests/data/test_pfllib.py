"""A folder as PFLlib writes it, and an .h5 file, are read as an .npz with the same arrays; no pickle calls anything."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pflmpi.cli import main
from pflmpi.data.own_files import read_own
from pflmpi.data.pfllib import read_pickle
from pflmpi.errors import DataError

RNG = np.random.default_rng(0)


def client(samples, *labels):
    return {"x": RNG.normal(size=(samples, 1, 4, 4)).astype(np.float32), "y": np.resize(np.array(labels), samples)}


def write(folder, train, test, **config):
    """The files as PFLlib writes them: one pickled dictionary in each."""
    for side, parts in (("train", train), ("test", test)):
        (folder / side).mkdir(parents=True)
        for number, part in enumerate(parts):
            np.savez_compressed(folder / side / f"{number}.npz", data=part)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_clients_tests_and_classes_are_those_of_the_files(tmp_path, capsys):
    train, test = [client(5, number % 3) for number in range(12)], [client(2, number % 3) for number in range(12)]
    dataset = read_own(write(tmp_path / "data", train, test, num_clients=12, num_classes=5))
    assert dataset.num_classes == 5 and dataset.writers is not None
    for number in range(12):  # 10 after 9
        for tested, parts in ((False, train), (True, test)):
            mask = (dataset.writers == number) & (dataset.official_test == tested)
            np.testing.assert_array_equal(dataset.images[mask], parts[number]["x"])
            np.testing.assert_array_equal(dataset.labels[mask], parts[number]["y"])
    assert main(["data", str(tmp_path / "data")]) == 0
    assert "clients  12, 7 to 7 samples each" in capsys.readouterr().out


def test_a_client_without_a_file_is_named(tmp_path):
    folder = write(tmp_path / "data", [client(3, 0), client(3, 1), client(3, 2)], [])
    (folder / "train" / "1.npz").unlink()
    with pytest.raises(DataError, match=r"there is no train/1\.npz; clients are counted from 0 without a gap"):
        read_own(folder)
    (folder / "train" / "0.npz").rename(folder / "train" / "1.npz")
    with pytest.raises(DataError, match=r"train/ begins with 1\.npz; rename the files .* to 0\.npz, 1\.npz, "):
        read_own(folder)


@pytest.mark.parametrize("config", [{}, {"num_classes": 3}])
def test_labels_may_be_whole_numbers_stored_as_floats(config, tmp_path):
    part = client(6, 0, 1, 2)
    dataset = read_own(write(tmp_path / "data", [{**part, "y": part["y"].astype(np.float64)}], [], **config))
    assert dataset.labels.tolist() == [0, 1, 2, 0, 1, 2] and dataset.num_classes == 3


def test_rows_of_tokens_and_their_number_are_sequences(tmp_path):
    texts = np.array([([4, 2, 0, 0], 2), ([5, 1, 3, 0], 3)], dtype=object)
    dataset = read_own(write(tmp_path / "data", [{"x": texts, "y": np.array([0, 1])}], []))
    assert dataset.images.tolist() == [[4, 2, 0, 0], [5, 1, 3, 0]]


class Command:
    """Unpickled, it would run a command."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def test_a_pickle_that_would_call_something_is_refused_and_calls_nothing(tmp_path):
    part = {**client(3, 0, 1), "more": Command(tmp_path / "called")}
    with pytest.raises(DataError, match=r"0\.npz: it would call \w+\.system, which no data needs"):
        read_own(write(tmp_path / "data", [part], []))
    assert not (tmp_path / "called").exists()


class Call:
    """Unpickled, it would call a function, and set the state of the result."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


OBJECTS = Call(np.dtype, "O", False, True)
EMPTY = np.zeros(0).__reduce__()[:2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (Call(eval, "1 + 1"), "it would call builtins.eval"),
        (Call(np.load, "x.npy"), r"it would call numpy\.load"),
        (Call(np.frombuffer, b"12345678"), r"it would call numpy(\.\w+)*\.frombuffer"),
        ({"x": np.array([Call(os.system, "true")], object)}, r"it would call \w+\.system"),
        (np.array([[Call(eval, "1")]], object), "it would call builtins.eval"),
        # NumPy's own constructors would take these bytes for the address of an object.
        (Call(np.ndarray, (1,), OBJECTS, b"A" * 8), "no pickle of arrays"),
        (Call(EMPTY[0], *EMPTY[1], state=(1, (1,), OBJECTS, False, b"A" * 8)), "cannot reshape"),
    ],
)
def test_a_pickle_names_no_function_and_no_address(content, said):
    with pytest.raises(ValueError, match=said):
        read_pickle(pickle.dumps(content, 4))


@pytest.mark.parametrize(
    ("train", "test", "config", "said"),
    [
        ([client(3, 0, 1)], [], {"num_clients": 2}, "config.json says 2 clients, and train/ has 1"),
        ([client(3, 0, 4)], [], {"num_classes": 3}, "says 3 classes, and y has labels 0 to 4"),
        ([client(3, 0, 4)], [], {"num_classes": 10**6}, "it has 1000000 classes; allowed are at most 10000"),
        ([client(3, 0)], [client(1, 0), client(1, 0)], {}, "test/1.npz has no train/1.npz"),
        ([client(3, 0), {"x": np.zeros((1, 2)), "y": np.zeros(1)}], [], {}, r"float64 \[2\] .* float32 \[1, 4, 4\]"),
        ([{"x": np.zeros((1, 2))}], [], {}, "no dictionary with x and y"),
        (
            [client(3, 0), client(0, 0), client(3, 1)],
            [],
            {},
            r"train/1\.npz has no samples; clients are counted from 0",
        ),
        ([client(3, 0), {"x": np.zeros((1, 1, 4, 4)), "y": np.zeros(2)}], [], {}, r"train/1\.npz: x has the shape"),
        ([{"x": np.zeros((2, 2)), "y": [0, np.nan]}], [], {}, r"train/0\.npz: sample 1 has the label nan; fill it in"),
        ([{"x": np.zeros((2, 2)), "y": [0, 0.5]}], [], {"num_classes": 2}, "y must be whole numbers, and one is 0.5"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(train, test, config, said, tmp_path):
    with pytest.raises(DataError, match=said):
        read_own(write(tmp_path / "data", train, test, **config))


def test_an_h5_file_is_read_as_an_npz_with_the_same_arrays(tmp_path):
    arrays = {**client(6, 0, 1), "client": np.array([3, 3, 5, 5, 5, 3]), "test": np.array([0, 1] * 3, bool)}
    np.savez(tmp_path / "data.npz", **arrays)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
    assert read_own(tmp_path / "data.h5").digest == read_own(tmp_path / "data.npz").digest


def test_an_h5_file_that_is_none_or_lacks_y_is_refused(tmp_path):
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(DataError, match=r"text\.h5' cannot be used"):
        read_own(tmp_path / "text.h5")
    with h5py.File(tmp_path / "half.h5", "w") as file:
        file["x"] = np.zeros((2, 3))
    with pytest.raises(DataError, match="no array 'y' in it"):
        read_own(tmp_path / "half.h5")
