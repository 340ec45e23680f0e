"""The cache of arrays that the ranks of a node share."""

import logging
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from pflmpi import machine
from pflmpi.data.cache import read_cached
from pflmpi.data.dataset import Dataset
from pflmpi.errors import ConfigError
from raw_files import alike, toy


class Reader:
    """Reads a toy dataset and counts how often."""

    def __init__(self, file: Path) -> None:
        self.calls = 0
        file.write_text("raw")
        self.files = [file]

    def __call__(self) -> Dataset:
        self.calls += 1
        return toy([20, 20], [5, 5])

    def load(self, folder: Path | None) -> Dataset:
        return read_cached("toy", self.files, self, folder and str(folder))


@pytest.fixture
def reader(tmp_path):
    return Reader(tmp_path / "raw")


def entry(folder):
    """Return the only entry of a cache folder."""
    entries = [path for path in folder.iterdir() if path.is_dir()]
    assert len(entries) == 1, entries
    return entries[0]


def test_data_is_read_once_and_then_mapped(reader, tmp_path):
    results = [reader.load(tmp_path / "cache") for _ in range(3)]
    assert reader.calls == 1
    assert all(alike(result, reader()) and not result.images.flags.writeable for result in results)


def test_one_of_many_readers_reads_and_the_others_wait(reader, tmp_path):
    start, results = threading.Barrier(6), []

    def rank():
        start.wait()
        results.append(reader.load(tmp_path / "cache"))

    threads = [threading.Thread(target=rank) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reader.calls == 1 and len(results) == 6 and all(alike(result, results[0]) for result in results)


@pytest.mark.parametrize("file", ["images.npy", "labels.npy", "official_test.npy", "writers.npy", "entry.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
def test_a_damaged_entry_is_rebuilt(file, damage, reader, tmp_path):
    reader.load(tmp_path / "cache")
    path = entry(tmp_path / "cache") / file
    good = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(good[:-9] if damage == "truncated" else good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    assert alike(reader.load(tmp_path / "cache"), reader())
    assert reader.calls == 3, "once to fill, once to rebuild, once here"
    assert path.read_bytes() == good


def test_changed_raw_files_are_read_anew(reader, tmp_path):
    reader.load(tmp_path / "cache")
    reader.files[0].write_text("raw, but longer")
    reader.load(tmp_path / "cache")
    os.utime(reader.files[0], ns=(1, 1))
    reader.load(tmp_path / "cache")
    assert reader.calls == 3


def test_an_unwritable_cache_is_skipped(reader, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        data = reader.load(reader.files[0] / "below a file")
    assert alike(data, reader()) and data.images.flags.writeable
    assert "data cache not used" in caplog.text


def test_a_full_disk_leaves_the_data_in_memory_and_nothing_behind(reader, tmp_path, monkeypatch, caplog):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        data = reader.load(tmp_path / "cache")
    assert reader.calls == 1 and alike(data, reader())
    assert "No space left on device" in caplog.text
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_leftovers_of_a_killed_process_are_removed(reader, tmp_path):
    reader.load(tmp_path / "cache")
    good = entry(tmp_path / "cache")
    leftover = good.with_name(good.name + ".tmp-dead")
    good.rename(leftover)
    assert alike(reader.load(tmp_path / "cache"), reader())
    assert entry(tmp_path / "cache") == good and not leftover.exists()


def test_the_users_own_folder_is_private(reader, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reader.load(None)
    folder = tmp_path / f"pflmpi-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and entry(folder) and machine.private_folder() == folder


@pytest.mark.parametrize("taken", ["a link", "a file", "open to all", "another user's"])
def test_a_folder_that_is_not_the_users_own_is_refused_and_another_can_be_named(taken, reader, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"pflmpi-{os.getuid()}"
    if taken == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif taken == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777 if taken == "open to all" else 0o755)
    if taken == "another user's":
        user, lstat = os.getuid() + 1, Path.lstat

        def of_another(path):
            status = lstat(path)
            return os.stat_result([*status[:4], user, *status[5:]]) if path == folder else status

        monkeypatch.setattr(Path, "lstat", of_another)
    with pytest.raises(ConfigError, match=rf"{folder} is a link, another user's, or open to others; .* runtime.cache"):
        reader.load(None)
    assert reader.calls == 0 and alike(reader.load(tmp_path / "named" / "cache"), reader())
    assert stat.S_IMODE((tmp_path / "named" / "cache").stat().st_mode) == 0o700
