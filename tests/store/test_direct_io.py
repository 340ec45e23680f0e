"""Large writes past the page cache: the same bytes as any other write, whatever the file system can do."""

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pflmpi.store import checked_hdf5
from pflmpi.store.large_files import direct_io

BLOCK = 4096
POSITIONS = [0, 1, 512, BLOCK - 1, BLOCK, BLOCK + 3]
SIZES = [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK, 5 * BLOCK + 17]


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write of some blocks takes several turns of the buffer."""
    monkeypatch.setattr(direct_io, "_BUFFER", 2 * BLOCK)
    monkeypatch.setattr(direct_io, "_of_thread", threading.local())


def check(path: Path, position: int, size: int) -> None:
    """Write into the middle of a file, and compare all of it."""
    before = np.random.default_rng(size).bytes(8 * BLOCK)
    path.write_bytes(before)
    content = np.random.default_rng(position).bytes(size)
    descriptor = os.open(path, os.O_RDWR)
    try:
        direct_io.write_at(descriptor, content, position)
        assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    finally:
        os.close(descriptor)
    assert path.read_bytes() == before[:position] + content + before[position + size :]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.usefixtures("small_buffer")
def test_the_bytes_are_written_and_no_others(tmp_path: Path, position: int, size: int) -> None:
    check(tmp_path / "file", position, size)


@pytest.mark.usefixtures("small_buffer")
def test_whole_blocks_of_a_large_file_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the file system of the tests cannot: {error.strerror}")
    past, real = [0], os.pwrite

    def counted(descriptor: int, content: bytes, position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            past[0] += len(content)
        return real(descriptor, content, position)

    monkeypatch.setattr(os, "pwrite", counted)
    array = np.arange(1 << 20, dtype=np.float64)
    checked_hdf5.write(tmp_path / "file.h5", lambda file: checked_hdf5.put(file, "array", array) and None)
    assert array.nbytes - 2 * BLOCK < past[0] <= array.nbytes
    assert checked_hdf5.damage(tmp_path / "file.h5") is None


def refused(_descriptor: int, _content: bytes, _position: int) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def cut(descriptor: int, content: bytes, position: int) -> int:
    return os.pwritev(descriptor, [content[: BLOCK // 8]], position)  # as a signal or a full disk does


@pytest.mark.parametrize("write", [refused, cut])
@pytest.mark.usefixtures("small_buffer")
def test_where_it_does_not_go_the_rest_is_written_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[int, bytes, int], int]
) -> None:
    real = os.pwrite

    def sometimes(descriptor: int, content: bytes, position: int) -> int:
        past = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        return (write if past else real)(descriptor, content, position)

    monkeypatch.setattr(os, "pwrite", sometimes)
    for position in POSITIONS:
        check(tmp_path / "file", position, SIZES[-1])


def test_a_file_system_without_such_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def without(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", without)
    check(tmp_path / "file", 1, SIZES[-1])


def test_a_full_disk_is_said_and_the_file_goes_on_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int, _content: bytes, _position: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            direct_io.write_at(descriptor, bytes(2 * BLOCK), 0)
        assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    finally:
        os.close(descriptor)
