"""The cache of arrays that the ranks of a node share."""

import logging
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from pflmpi import machine
from pflmpi.data import cache
from pflmpi.data.cache import cached
from pflmpi.data.dataset import Dataset
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
        return cached("toy", self.files, self, folder)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path / "raw")


def entry(folder: Path) -> Path:
    """Return the only entry of a cache folder."""
    found = [path for path in folder.iterdir() if path.is_dir()]
    assert len(found) == 1, found
    return found[0]


def test_data_is_read_once_and_then_mapped(reader: Reader, tmp_path: Path) -> None:
    results = [reader.load(tmp_path / "cache") for _ in range(3)]
    assert reader.calls == 1
    assert all(alike(result, reader()) and not result.images.flags.writeable for result in results)


def test_one_of_many_readers_reads_and_the_others_wait(reader: Reader, tmp_path: Path) -> None:
    start, results = threading.Barrier(6), []

    def rank() -> None:
        start.wait()
        results.append(reader.load(tmp_path / "cache"))

    threads = [threading.Thread(target=rank) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reader.calls == 1 and len(results) == 6 and all(alike(result, results[0]) for result in results)


def test_an_entry_is_verified_once_while_what_was_loaded_is_in_use(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six ranks of a node need not all compute the digest of the same files."""
    reader.load(tmp_path / "cache")
    verified = []
    digest = cache.content_digest
    monkeypatch.setattr(cache, "content_digest", lambda *arrays: verified.append(1) or digest(*arrays))
    in_use = [reader.load(tmp_path / "cache") for _ in range(6)]
    assert len(verified) == 1
    image = entry(tmp_path / "cache") / "images.npy"
    good = image.read_bytes()
    image.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert alike(reader.load(tmp_path / "cache"), reader()) and image.read_bytes() == good, "a changed file is verified"
    del verified[:]
    in_use.clear()
    reader.load(tmp_path / "cache")
    assert len(verified) == 1, "who verified it has ended"


@pytest.mark.parametrize("file", ["images.npy", "labels.npy", "official_test.npy", "writers.npy", "entry.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
def test_a_damaged_entry_is_rebuilt(file: str, damage: str, reader: Reader, tmp_path: Path) -> None:
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


def test_changed_raw_files_are_read_anew(reader: Reader, tmp_path: Path) -> None:
    reader.load(tmp_path / "cache")
    reader.files[0].write_text("raw, but longer")
    reader.load(tmp_path / "cache")
    os.utime(reader.files[0], ns=(1, 1))
    reader.load(tmp_path / "cache")
    assert reader.calls == 3


def test_an_unwritable_cache_is_skipped(reader: Reader, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = reader.load(reader.files[0] / "below a file")
    assert alike(data, reader()) and data.images.flags.writeable
    assert "data cache not used" in caplog.text


def test_a_full_disk_leaves_the_data_in_memory_and_nothing_behind(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        data = reader.load(tmp_path / "cache")
    assert reader.calls == 1 and alike(data, reader())
    assert "No space left on device" in caplog.text
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_leftovers_of_a_killed_process_are_removed(reader: Reader, tmp_path: Path) -> None:
    reader.load(tmp_path / "cache")
    good = entry(tmp_path / "cache")
    leftover = good.with_name(good.name + ".tmp-dead")
    good.rename(leftover)
    assert alike(reader.load(tmp_path / "cache"), reader())
    assert entry(tmp_path / "cache") == good and not leftover.exists()


def test_the_users_own_folder_is_private(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reader.load(None)
    folder = tmp_path / f"pflmpi-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and entry(folder)
    folder.chmod(0o755)
    assert machine.private_folder() == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700, "made private again"


@pytest.mark.parametrize("taken", ["a link", "a file", "open to all", "another user's"])
def test_a_folder_that_somebody_made_first_does_not_block_the_cache(
    taken: str, reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    user = os.getuid()
    folder = tmp_path / f"pflmpi-{user}"
    if taken == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif taken == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777 if taken == "open to all" else 0o755)
    if taken == "another user's":
        owned_by(folder, user + 1, monkeypatch)
        owned_by(tmp_path / f"{folder.name}-cache-0000", user + 1, monkeypatch).mkdir()
    with caplog.at_level(logging.WARNING):
        results = [reader.load(None) for _ in range(3)]
    assert reader.calls == 1 and not caplog.text and all(alike(one, results[0]) for one in results)
    own = machine.private_folder()
    assert own != folder and own.name.startswith(f"{folder.name}-cache-") and entry(own)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700 and machine.private_folder() == own


@pytest.mark.parametrize("file", ["images.npy", "entry.json"])
@pytest.mark.parametrize("how", ["another user's", "writable by all", "a link", "a pipe"])
def test_a_planted_file_is_refused_and_the_entry_rebuilt(
    file: str,
    how: str,
    reader: Reader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader.load(tmp_path / "cache")
    path = entry(tmp_path / "cache") / file
    good = path.read_bytes()
    if how == "another user's":
        owned_by(path, os.getuid() + 1, monkeypatch)
    elif how == "writable by all":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere") if how == "a link" else os.mkfifo(path)
    with caplog.at_level(logging.WARNING):
        assert alike(reader.load(tmp_path / "cache"), reader())
    assert reader.calls == 3 and "will be rewritten" in caplog.text
    assert path.read_bytes() == good and not path.is_symlink()


def test_files_of_the_cache_are_private_whatever_the_umask(reader: Reader, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        reader.load(tmp_path / "cache")
    finally:
        os.umask(before)
    found = {stat.S_IMODE(path.stat().st_mode) for path in entry(tmp_path / "cache").iterdir()}
    assert found == {0o600}
    reader.load(tmp_path / "cache")
    assert reader.calls == 1


def owned_by(path: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a path that exists, or will, look as if another user owned it, until it is replaced."""
    real_fstat, real_lstat = os.fstat, Path.lstat
    inode = path.stat().st_ino if path.exists() else None

    def changed(found: os.stat_result) -> os.stat_result:
        return os.stat_result([*found[:4], user, *found[5:]])

    def fstat(descriptor: int) -> os.stat_result:
        found = real_fstat(descriptor)
        return changed(found) if found.st_ino == inode else found

    def lstat(self: Path) -> os.stat_result:
        found = real_lstat(self)
        return changed(found) if self == path else found

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(Path, "lstat", lstat)
    return path
