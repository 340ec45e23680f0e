"""Datasets and attributes that are written quickly are the bytes that h5py's own functions write."""

import os

import h5py
import numpy as np
import pytest

from pflmpi.store import checked_hdf5, run_folder, verify
from pflmpi.store.hdf5 import write_array, write_attribute
from store_world import World

ARRAYS = {
    "a/b/c": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a/number": np.array(3, np.int64),
    "a/none": np.zeros((0, 4), np.uint8),
    "flags": np.array([True, False]),
    "names": np.array([b"one", b"three"]),
}
VALUES = {"text": "Größe", "empty": "", "whole": 3, "part": 0.5, "yes": True, "crc32": np.uint32(2**32 - 1)}
FORM = {"libver": ("v110", "v110"), "userblock_size": 512}


def test_what_is_written_is_what_h5py_writes(tmp_path):
    with h5py.File(tmp_path / "quick.h5", "w", **FORM) as file:
        for path, array in ARRAYS.items():
            dataset = write_array(file.id, path, array)
            for name, value in VALUES.items():
                write_attribute(dataset, name, value)
        write_attribute(file.id, "round", 7)
    with h5py.File(tmp_path / "plain.h5", "w", **FORM) as file:
        for path, array in ARRAYS.items():
            file.create_dataset(path, data=array).attrs.update(VALUES)
        file.attrs["round"] = 7
    with h5py.File(tmp_path / "quick.h5") as quick, h5py.File(tmp_path / "plain.h5") as plain:
        assert quick.attrs["round"] == plain.attrs["round"] == 7
        for path, array in ARRAYS.items():
            dataset, expected = quick[path], plain[path]
            assert dataset.dtype == expected.dtype == array.dtype and np.array_equal(dataset[()], array)
            assert list(dataset.attrs) == list(expected.attrs)
            for name in VALUES:
                value, expected_value = dataset.attrs[name], expected.attrs[name]
                assert type(value) is type(expected_value) and value == expected_value
                assert dataset.attrs.get_id(name).dtype == expected.attrs.get_id(name).dtype
    assert (tmp_path / "quick.h5").stat().st_size == (tmp_path / "plain.h5").stat().st_size


def test_what_a_checkpoint_has_written_it_does_not_open_again(tmp_path, monkeypatch):
    world, opened = World(tmp_path / "run", [0, 1, 0, 1], 0), []
    make = h5py.Dataset.__init__
    monkeypatch.setattr(h5py.Dataset, "__init__", lambda *args, **named: opened.append(0) or make(*args, **named))
    world.save(0, ranks=2)
    assert not opened


def test_a_small_file_is_written_at_once_and_is_the_same_as_one_in_pieces(tmp_path, monkeypatch):
    write, sizes = os.pwrite, list[int]()

    def counted(descriptor: int, content: bytes, position: int) -> int:
        sizes.append(len(content))
        return write(descriptor, content, position)

    monkeypatch.setattr(os, "pwrite", counted)
    worlds = [World(tmp_path / name, [0, 1, 0, 1], 0) for name in ("small", "pieces")]
    worlds[0].save(0, ranks=2)
    files = sorted(worlds[0].run.rglob("*.h5"))
    assert sorted(sizes) == sorted(path.stat().st_size for path in files)
    monkeypatch.setattr(checked_hdf5, "_SMALL", 0)
    worlds[1].save(0, ranks=2)
    assert len(sizes) > 2 * len(files)
    for world in worlds:
        assert verify.problems(world.run, 0) == [] and run_folder.digest(world.run, 0) == worlds[0].digest()
    for path in files:
        with h5py.File(path) as small, h5py.File(worlds[1].run / path.relative_to(worlds[0].run)) as pieces:
            assert small.userblock_size == pieces.userblock_size == 512
            assert checked_hdf5.names(small) == checked_hdf5.names(pieces)


def test_a_large_array_is_written_in_one_call_and_not_read_again(tmp_path, monkeypatch):
    write, read, written, read_again = os.pwrite, os.pread, list[int](), list[int]()

    def counted(descriptor: int, size: int, position: int) -> bytes:
        content = read(descriptor, size, position)
        read_again.append(len(content))
        return content

    monkeypatch.setattr(os, "pwrite", lambda *args: written.append(len(args[1])) or write(*args))
    monkeypatch.setattr(os, "pread", counted)
    arrays = {"large": np.arange(1 << 20, dtype=np.float64), "small": np.arange(3), "flags": np.ones(1 << 21, bool)}

    def fill(writer: checked_hdf5.HDF5Writer) -> None:
        for name, array in arrays.items():
            writer.write_dataset(name, array)

    checked_hdf5.write(tmp_path / "file.h5", fill)
    assert 8 << 20 in written and 1 << 21 in written and max(written) == 8 << 20
    assert sum(read_again) < 1 << 16
    assert (
        checked_hdf5.find_damage(tmp_path / "file.h5") is None
        and checked_hdf5.damaged_arrays(tmp_path / "file.h5") == []
    )
    with h5py.File(tmp_path / "file.h5") as file:
        assert all(np.array_equal(file[name][()], array) for name, array in arrays.items())


@pytest.mark.parametrize("error", [AssertionError, ZeroDivisionError, NameError, KeyboardInterrupt])
def test_a_mistake_of_ours_is_no_file_that_cannot_be_read(error, tmp_path):
    with h5py.File(tmp_path / "file.h5", "w") as file:
        file.attrs["format_version"] = checked_hdf5.FORMAT_VERSION
    with pytest.raises(error), checked_hdf5.reading(tmp_path / "file.h5"):
        raise error
