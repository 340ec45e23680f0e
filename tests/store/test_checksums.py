"""Checksums of bytes that are known in parts are those of going over all of them."""

import os
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from pflmpi.store import checked_hdf5, checksums
from pflmpi.store.checksums import Part, crc32_combine, crc32_join, crc32_of_file, crc32_of_rows, crc32_repeat
from pflmpi.store.shard import write_shard


@pytest.mark.parametrize("times", [0, 1, 2, 3, 10, 1023])
@pytest.mark.parametrize("length", [0, 1, 5, 4096])
def test_repeated_bytes(times: int, length: int) -> None:
    content = np.random.default_rng(length).bytes(length)
    assert crc32_repeat(zlib.crc32(content), length, times) == zlib.crc32(content * times)


@pytest.mark.parametrize("length", [0, 1, 5, 4096])
def test_bytes_that_follow_others(length: int) -> None:
    contents = [np.random.default_rng(seed).bytes(length) for seed in range(4)]
    starts, seconds = [0, 1, 2**32 - 1, 12345], [zlib.crc32(content) for content in contents]
    expected = [zlib.crc32(content, start) for content, start in zip(contents, starts, strict=True)]
    assert [crc32_combine(start, second, length) for start, second in zip(starts, seconds, strict=True)] == expected
    together = crc32_combine(np.array(starts, np.uint32), np.array(seconds, np.uint32), length)
    assert together.dtype == np.uint32 and together.tolist() == expected


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1,), (7, 5), (3, 1 << 14), (2, 3, 1 << 15)])
def test_rows_and_the_whole(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    rows = crc32_of_rows(array)
    assert rows.dtype == np.uint32 and rows.tolist() == [zlib.crc32(row.tobytes()) for row in array]
    assert crc32_join(rows, array[:1].nbytes) == zlib.crc32(array.tobytes())


def test_long_rows_are_gone_over_once(tmp_path: Path) -> None:
    array = np.random.default_rng(2).normal(size=(25, 1 << 14)).astype(np.float32)
    with mock.patch.object(checksums.zlib, "crc32", wraps=zlib.crc32) as counted:
        write_shard(tmp_path / "shard.h5", {"cohort0": (np.arange(25), {"weight": array})})
    assert array.nbytes <= sum(len(call.args[0]) for call in counted.call_args_list) < 1.1 * array.nbytes


@pytest.mark.parametrize("known", [[], [(512, 10)], [(900, 100), (512, 1)], [(600, 400)], [(512, 488)], [(550, 0)]])
def test_a_file_of_which_parts_are_known(known: list[tuple[int, int]], tmp_path: Path) -> None:
    content = np.random.default_rng(3).bytes(1000)
    (tmp_path / "file").write_bytes(content)
    parts = [Part(start, size, zlib.crc32(content[start : start + size])) for start, size in known]
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert crc32_of_file(descriptor, 512, parts) == (488, zlib.crc32(content[512:]))
        assert crc32_of_file(descriptor, 5000) == (0, 0), "a file that is shorter than its head"
    finally:
        os.close(descriptor)


def test_a_shard_is_not_read_again_when_it_has_been_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    leaves = {"bias": rng.normal(size=(9, 3)), "own": np.zeros((9, 0)), "weight": rng.normal(size=(9, 20, 1 << 10))}
    leaves["same"] = np.broadcast_to(rng.normal(size=(1, 1 << 15)), (9, 1 << 15))
    path = tmp_path / "shard.h5"
    read = list[bytes]()

    def noted(*where: int) -> bytes:
        read.append(os_pread(*where))
        return read[-1]

    os_pread = os.pread
    with mock.patch.object(checksums.os, "pread", noted):
        write_shard(path, {"cohort0": (np.arange(9), leaves)})
    assert sum(map(len, read)) < leaves["weight"].nbytes // 2
    assert checked_hdf5.damage(path) is None, "the checksum of the file is that of its bytes"
