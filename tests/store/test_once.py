"""Rows that are all the same are stored once, and read by everyone as if each were there."""

import os
import shutil
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from described import about
from pflmpi.errors import CheckpointError
from pflmpi.store import one_file, run_folder, verify
from pflmpi.store.digest import digest_of_blocks
from pflmpi.store.layout import Layout
from pflmpi.store.names import shard_path
from pflmpi.store.round_file import RoundContent, write_round
from pflmpi.store.shard import Arrays, find_row_problem, read_leaf, read_rows, write_shard
from store_world import write_metrics

N = 3000
KINDS = {
    "cohort0": {
        "flag": ((200, 2), np.dtype(bool)),
        "model/bias": ((100,), np.dtype(np.float32)),
        "model/steps": ((), np.dtype(np.int64)),
        "model/weight": ((20, 30), np.dtype(np.float32)),
        "nothing": ((0, 3), np.dtype(np.float32)),
        "own": ((2,), np.dtype(np.float64)),
    }
}
WHO = np.arange(N)


def state(rows: int = N) -> Arrays:
    """All rows of a leaf are one in memory, but for `own`."""
    rng = np.random.default_rng(0)
    leaves = {}
    for path, (shape, dtype) in KINDS["cohort0"].items():
        row = rng.integers(0, 2, (1, *shape)).astype(dtype) if path == "flag" else rng.normal(size=(1, *shape))
        leaves[path] = np.broadcast_to(row.astype(dtype), (rows, *shape))
    return leaves | {"own": rng.normal(size=(rows, 2))}


def in_full(rows: Arrays) -> Arrays:
    return {path: np.array(array) for path, array in rows.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Round 0 with equal rows, round 1 after 30 scattered clients have trained."""
    folder = tmp_path / "run"
    folder.mkdir()
    layout = Layout.unwritten(np.zeros(N, np.int64)).updated(0, [WHO], np.zeros(N, np.int64))
    write_shard(shard_path(folder, 0, 0), {"cohort0": (WHO, state())})
    write_round(
        folder, RoundContent(0, {}, metrics_file=write_metrics(folder, 0)), layout, KINDS, {"config": "seed: 0"}
    )
    who = WHO[5::100]
    write_shard(shard_path(folder, 1, 0), {"cohort0": (who, in_full({k: v[who] for k, v in after().items()}))})
    layout = layout.updated(1, [who], np.zeros(N, np.int64))
    write_round(
        folder, RoundContent(1, {}, metrics_file=write_metrics(folder, 1)), layout, KINDS, {"config": "seed: 0"}
    )
    return folder


def after() -> Arrays:
    """The state after round 1."""
    arrays = in_full(state())
    for array in arrays.values():
        array[5::100] = array[5::100] == 0
    return arrays


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape and np.ascontiguousarray(actual).tobytes() == expected.tobytes()


def test_equal_rows_take_the_room_of_one(run):
    num_bytes = sum(array.nbytes for array in in_full(state()).values())
    least = 12 * N + 16 * N + 8 * N  # ids with checksums, `own`, and steps, which are small
    assert num_bytes > 9e6 and shard_path(run, 0, 0).stat().st_size < least + 100_000


def test_h5py_finds_a_row_for_every_client_also_in_a_moved_folder(run, monkeypatch):
    moved = run.with_name("moved")
    shutil.move(run, moved)
    monkeypatch.chdir("/")
    for round, expected in ((0, in_full(state())), (1, after())):
        with h5py.File(moved / f"round_0000{round}.h5") as file:
            for path, array in expected.items():
                same(file["clients"][path][()].astype(array.dtype), array)
                same(file["clients"][path][95:1207:3].astype(array.dtype), array[95:1207:3])


def test_what_is_stored_once_has_a_checksum_of_its_own_and_rows_have_theirs(run):
    with h5py.File(shard_path(run, 0, 0)) as file:
        once = sorted(file["cohort0/once"]["model"]) + [name for name in file["cohort0/once"] if name != "model"]
        row = state()["model/weight"][:1]
        assert once == ["bias", "weight", "flag"]
        assert about(file)["arrays"]["cohort0/once/model/weight"]["crc32"] == zlib.crc32(row.tobytes())
        rows = in_full({name: array for name, array in state().items() if name in ("model/steps", "own")})
        content = b"".join(np.int64(7).tobytes() if name == "" else rows[name][7].tobytes() for name in ("", *rows))
        assert file["cohort0/row_crc32"][7] == zlib.crc32(content)


def test_rows_are_read_in_any_pattern_and_leaves_alone(run):
    path = shard_path(run, 0, 0)
    for at in (np.array([7]), np.array([0, 2999]), np.arange(40, 90), WHO, WHO[:0]):
        for leaf, array in read_rows(path, "cohort0", at, at).items():
            same(array, in_full(state())[leaf][at])
            same(read_leaf(path, "cohort0", leaf, at), array.copy())
    assert find_row_problem(path, "cohort0", WHO, WHO) is None
    with pytest.raises(CheckpointError, match="the rows of 1 clients, the first is client 8"):
        read_rows(path, "cohort0", np.array([8]), np.array([7]))
    with pytest.raises(CheckpointError, match="no row 3000 of cohort0"):
        read_leaf(path, "cohort0", "model/weight", np.array([3000]))


def test_digest_verification_and_export_do_not_depend_on_it(run, tmp_path):
    for round, expected in ((0, in_full(state())), (1, after())):
        digest = digest_of_blocks({}, [{"cohort0": (WHO, expected)}])
        assert run_folder.digest(run, round) == digest
        assert verify.problems(run, round) == []
    for compress in (False, True):
        one_file.write(tmp_path / "one.h5", run, 1, compress, lambda done, of: None)
        assert verify.explain_not_a_run(tmp_path / "one.h5") is None
        assert one_file.digest(tmp_path / "one.h5") == digest


def test_a_continuation_reads_equal_rows_as_one(run, monkeypatch):
    monkeypatch.setattr(run_folder, "_AT_ONCE", 200_000)
    rows = {path: np.zeros_like(array) for path, array in after().items()}
    most = 0
    for clients, arrays in run_folder.read_pieces(run, 1, WHO[3:2000]):
        assert (clients >= 3).all() and (clients < 2000).all()
        most = max(most, sum(array.nbytes for array in arrays.values()))
        if len(clients) > 1 and clients[0] % 100 != 5:
            assert arrays["model/weight"].strides[0] == 0
        for path, array in arrays.items():
            rows[path][clients] = array
    assert most < 250_000
    for path, array in after().items():
        same(rows[path][3:2000], array[3:2000])


def test_a_changed_byte_of_the_one_row_is_found(run):
    path = shard_path(run, 0, 0)
    content, row = bytearray(path.read_bytes()), state()["model/weight"][0].tobytes()
    assert content.count(row) == 1
    content[content.index(row)] ^= 1
    path.write_bytes(content)
    assert verify.problems(run, 1) == [f"{path} is damaged: its CRC-32 is {crc(path)}"]
    with pytest.raises(CheckpointError, match=r"once/model/weight in .* is damaged"):
        read_rows(path, "cohort0", WHO[:2], WHO[:2])


def crc(path: Path) -> str:
    content = path.read_bytes()
    return f"{zlib.crc32(content[512:]):08x}, {content[:512].split(b'crc32=')[1][:8].decode()} was written"


def test_few_rows_and_short_ones_are_stored_as_they_are(tmp_path):
    path = tmp_path / "shard.h5"
    write_shard(path, {"cohort0": (WHO[:3], state(3))})
    with h5py.File(path) as file:
        assert "once" not in file["cohort0"] and not file["cohort0/rows/model/weight"].is_virtual
    assert os.path.getsize(path) < 30_000


def test_no_dataset_says_when_it_was_made(run):
    def look(name: str, item: h5py.Group | h5py.Dataset) -> None:
        assert not item.id.get_create_plist().get_obj_track_times(), name

    for path in (shard_path(run, 0, 0), run_folder.round_path(run, 0)):
        with h5py.File(path) as file:
            file.visititems(look)
