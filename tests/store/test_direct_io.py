"""Direct I/O writes the same bytes as any other write, whatever the file system supports."""

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
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks are a large write, which fills the buffer several times."""
    monkeypatch.setattr(direct_io, "_LEAST", BLOCK)
    monkeypatch.setattr(direct_io, "_BUFFER", 2 * BLOCK)
    monkeypatch.setattr(direct_io, "_thread_local", threading.local())


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
@pytest.mark.usefixtures("small")
def test_the_bytes_are_written_and_no_others(tmp_path: Path, position: int, size: int) -> None:
    check(tmp_path / "file", position, size)


def test_whole_blocks_of_a_large_array_are_written_by_direct_io_and_a_small_array_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the file system of the tests cannot: {error.strerror}")
    direct, real = [0], os.pwrite

    def counted(descriptor: int, content: bytes, position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            direct[0] += len(content)
        return real(descriptor, content, position)

    monkeypatch.setattr(os, "pwrite", counted)
    array = np.arange(1 << 20, dtype=np.float64)

    def fill(writing: checked_hdf5.Writing) -> None:
        writing.put("large", array)
        writing.put("small", array[: 1 << 16])

    checked_hdf5.write(tmp_path / "file.h5", fill)
    assert array.nbytes - 2 * BLOCK < direct[0] <= array.nbytes
    assert checked_hdf5.damage(tmp_path / "file.h5") is None


def refused(_descriptor: int, _content: bytes, _position: int) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def cut(descriptor: int, content: bytes, position: int) -> int:
    return os.pwritev(descriptor, [content[: BLOCK // 8]], position)  # as a signal or a full disk does


@pytest.mark.parametrize("write", [refused, cut])
@pytest.mark.usefixtures("small")
def test_what_direct_io_does_not_write_is_written_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[int, bytes, int], int]
) -> None:
    real = os.pwrite

    def sometimes(descriptor: int, content: bytes, position: int) -> int:
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        return (write if direct else real)(descriptor, content, position)

    monkeypatch.setattr(os, "pwrite", sometimes)
    for position in POSITIONS:
        check(tmp_path / "file", position, SIZES[-1])


@pytest.mark.usefixtures("small")
def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def without(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", without)
    check(tmp_path / "file", 1, SIZES[-1])


@pytest.mark.usefixtures("small")
def test_a_full_disk_is_reported_and_direct_io_is_off_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
