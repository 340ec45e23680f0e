"""Checksums of bytes that are known in parts are those of going over all of them."""

import os
import zlib
from unittest import mock

import numpy as np
import pytest

from pflmpi.store import checked_hdf5, checksums
from pflmpi.store.checksums import Part, crc32_of_file, crc32_of_rows
from pflmpi.store.shard import write_shard


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1,), (7, 5), (3, 1 << 14), (2, 3, 1 << 15)])
def test_each_row_has_the_checksum_of_its_bytes(shape):
    array = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    rows = crc32_of_rows(array)
    assert rows.dtype == np.uint32 and rows.tolist() == [zlib.crc32(row.tobytes()) for row in array]


@pytest.mark.parametrize("known", [[], [(512, 10)], [(900, 100), (512, 1)], [(600, 400)], [(512, 488)], [(550, 0)]])
def test_a_file_of_which_parts_are_known(known, tmp_path):
    content = np.random.default_rng(3).bytes(1000)
    (tmp_path / "file").write_bytes(content)
    parts = [Part(start, size, zlib.crc32(content[start : start + size])) for start, size in known]
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert crc32_of_file(descriptor, 512, parts) == (488, zlib.crc32(content[512:]))
        assert crc32_of_file(descriptor, 5000) == (0, 0), "a file that is shorter than its head"
    finally:
        os.close(descriptor)


def test_a_shard_is_not_read_again_when_it_has_been_written(tmp_path):
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
    assert checked_hdf5.find_damage(path) is None, "the checksum of the file is that of its bytes"
