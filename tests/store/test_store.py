"""What the store writes is what it reads, by whatever ranks and in whatever files."""

import fcntl
import hashlib
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from described import about, has_values
from pflmpi.errors import CheckpointError
from pflmpi.store import digest, run_folder, verify
from pflmpi.store.digest import digest_of_blocks
from pflmpi.store.layout import Layout
from pflmpi.store.names import shard_path
from pflmpi.store.shard import ClientRows, read_rows, write_shard
from store_world import World, alike

ONE = [0] * 12
TWO = [0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1]
WITH_NOTHING = [0, 2, 0, 0, 2, 2, 0]
NOTHING = [2] * 4


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize("cohort_of", [ONE, TWO, WITH_NOTHING, NOTHING], ids=["one", "two", "with nothing", "nothing"])
@pytest.mark.parametrize("seed", range(3))
def test_every_round_reads_back_as_written_by_changing_ranks(run, cohort_of, seed):
    world = World(run, cohort_of, seed)
    digests = []
    for round in range(5):
        world.save(round, ranks=int(world.rng.integers(1, 5)))
        digests.append(world.digest())
        alike(run_folder.read_server(run, round), world.server)
        alike(run_folder.read_metrics(run, round), world.metrics)
        alike(run_folder.read_bytes(run, round), world.moved)
        for requested in (np.arange(world.n), world.some()[::-1], ids()):
            rows, expected = run_folder.read_clients(run, round, requested), world.flat(requested)
            assert sorted(rows) == sorted(expected)
            for cohort, (clients, leaves) in expected.items():
                assert rows[cohort][0].tolist() == clients.tolist()
                alike(rows[cohort][1], leaves)
        world.train(world.some())
    assert run_folder.rounds(run) == [0, 1, 2, 3, 4]
    assert [run_folder.digest(run, round) for round in range(5)] == digests
    assert [verify.problems(run, round) for round in range(5)] == [[]] * 5
    assert verify.find_newest_good(run) == (4, [])


def test_layout_follows_each_client_to_its_newest_row():
    cohort_of = ids(0, 1, 0, 1, 0)
    start = Layout.unwritten(cohort_of)
    assert {name: clients.tolist() for name, clients in start.cohorts.items()} == {
        "cohort0": [0, 2, 4],
        "cohort1": [1, 3],
    }
    assert (start.files, start.file.tolist(), start.row.tolist()) == ((), [-1] * 5, [-1] * 5)

    first = start.updated(0, [ids(0, 1, 2), ids(3, 4)], cohort_of)
    assert first.files == ("shards/round_00000_rank_000.h5", "shards/round_00000_rank_001.h5")
    assert (first.file.tolist(), first.row.tolist()) == ([0, 0, 0, 1, 1], [0, 0, 1, 0, 0])

    second = first.updated(1, [ids(), ids(2, 3, 4)], cohort_of)  # rank 0 writes nothing, the file of rank 1 is free
    assert second.files == ("shards/round_00000_rank_000.h5", "shards/round_00001_rank_001.h5")
    assert (second.file.tolist(), second.row.tolist()) == ([0, 0, 1, 1, 1], [0, 0, 0, 0, 1])
    assert start.files == () and first.row.tolist() == [0, 0, 1, 0, 0]  # nothing was changed in place

    same = second.updated(2, [ids(), ids()], cohort_of)
    assert (same.files, same.file.tolist(), same.row.tolist()) == (second.files, [0, 0, 1, 1, 1], [0, 0, 0, 0, 1])


def test_only_changed_clients_are_written(run):
    world = World(run, ONE, 0)
    world.save(0, ranks=1)
    world.train(ids(2, 7))
    world.save(1, ranks=1)
    with h5py.File(shard_path(run, 1, 0)) as file:
        assert file["cohort0/client"][()].tolist() == [2, 7]
        assert file["cohort0/rows/seen"].shape == (2, 4)
    world.train(ids())
    world.save(2, ranks=3)
    assert sorted(path.name for path in (run / "shards").iterdir()) == [
        "round_00000_rank_000.h5",
        "round_00001_rank_000.h5",
    ]


def test_plain_h5py_reads_everything_also_after_the_folder_has_moved(run, monkeypatch):
    world = World(run, ONE, 1)
    for round in range(3):
        world.save(round, ranks=3)
        world.train(world.some()) if round < 2 else None
    moved = run.parent / "elsewhere" / "renamed"
    shutil.copytree(run, moved)
    shutil.rmtree(run)
    monkeypatch.chdir(moved.parent)
    with h5py.File("renamed/round_00002.h5") as file:
        attributes = about(file)["run"]
        assert attributes["round"] == 2 and file.attrs["format_version"] == 6
        assert attributes["share"] == 0.5 and len(attributes["config"]) == 160000
        alike(
            {"head/bias": file["server/head/bias"][()], "head/count": np.asarray(file["server/head/count"][()])},
            world.server,
        )
        for path, array in world.state["cohort0"].items():
            dataset = file["clients"][path]
            assert dataset.is_virtual and dataset.dtype == (np.int8 if array.dtype == bool else array.dtype)
            assert np.array_equal(dataset[()], array)
            assert np.array_equal(dataset[3:9:2], array[3:9:2])
        assert np.array_equal(file["metrics/accuracy"][()], world.metrics["accuracy"])
        assert np.array_equal(file["bytes/up"][()], world.moved["up"])
    assert run_folder.digest(moved, 2) == world.digest()
    attributes = run_folder.read_attributes(moved, 2)
    own = {"config": "seed: 0\n" * 20000, "ranks": 3, "round": 2, "share": 0.5}
    assert attributes == own


def test_several_cohorts_are_stored_apart_beside_their_ids(run):
    world = World(run, [0, 1, 2, 0, 1], 0)
    world.save(0, ranks=2)
    with h5py.File(run / "round_00000.h5") as file:
        assert sorted(file["clients"]) == ["cohort0", "cohort1"]  # cohort 2 keeps nothing
        assert file["clients/cohort1/client"][()].tolist() == file["cohort1_client"][()].tolist() == [1, 4]
        for cohort in ("cohort0", "cohort1"):
            for path, array in world.state[cohort].items():
                assert np.array_equal(file["clients"][cohort][path][()], array), path
                if array.size:
                    assert file["clients"][cohort][path].dims[0][0] == file[f"{cohort}_client"], path
    assert run_folder.read_layout(run, 0).file[2] == -1


def test_a_missing_shard_cannot_be_mistaken_for_values_by_plain_h5py(run):
    """A round file alone: no number and no boolean that a client may keep, and a word on it in the file."""
    world = World(run, TWO, 0)
    world.save(0, ranks=1)
    shutil.rmtree(run / "shards")
    with h5py.File(run / "round_00000.h5") as file:
        assert np.isnan(file["clients/cohort0/model/body/weight"][()]).all()
        assert (file["clients/cohort0/model/body/steps"][()] == np.iinfo(np.int64).min).all()
        seen = file["clients/cohort0/seen"]
        assert (seen[()] == -1).all() and h5py.check_enum_dtype(seen.dtype)["MISSING"] == -1
        assert (file["clients/cohort1/small"][()] == 255).all()
        arrays = about(file)["arrays"]
        missing = {path: arrays[f"clients/{path}"]["missing"] for path in ("cohort0/seen", "cohort1/small")}
        assert missing == {"cohort0/seen": "MISSING", "cohort1/small": "255"}
        assert about(file)["content"] == "index"
        assert "`pflmpi export RUN --round 0 --all -o one.h5`" in about(file)["content_description"]


def test_scattered_clients_make_one_mapping_for_each_shard(run):
    world = World(run, [0] * 300, 0)
    world.save(0, ranks=4)
    with h5py.File(run / "round_00000.h5") as file:
        assert len(file["clients/seen"].virtual_sources()) == 4


def test_a_leaf_called_client_is_refused_among_cohorts(run):
    world = World(run, TWO, 0)
    world.templates["cohort0"] = {"client": ((), np.dtype(np.int64))}
    with pytest.raises(AssertionError, match="may not be called client"):
        world.save(0, ranks=1)


def test_every_dataset_carries_the_crc32_of_its_bytes(run):
    World(run, TWO, 0).save(0, ranks=2)
    seen = 0
    for path in [run / "round_00000.h5", *sorted((run / "shards").iterdir())]:
        with h5py.File(path) as file:
            stored = []
            file.visititems(lambda _, item, into=stored: into.append(item) if isinstance(item, h5py.Dataset) else None)
            for dataset in stored:
                if not dataset.is_virtual and has_values(dataset):
                    entry = about(file)["arrays"][dataset.name[1:]]
                    assert entry["crc32"] == zlib.crc32(dataset[()].tobytes()), dataset.name
                    seen += 1
    assert seen > 20


def test_single_rows_of_a_shard_can_be_read_in_any_pattern(run):
    rows = {"w": np.arange(40, dtype=np.float32).reshape(20, 2), "b": np.arange(20)}
    run.mkdir()
    path = shard_path(run, 0, 0)
    write_shard(path, {"cohort0": (np.arange(100, 120), rows)})
    for chosen in ([0], [19], [0, 19], [3, 4, 5], [0, 1, 18], list(range(20)), []):
        at = np.array(chosen, np.int64)
        alike(read_rows(path, "cohort0", at + 100, at), {name: array[at] for name, array in rows.items()})
    with pytest.raises(CheckpointError, match=r"rank_000\.h5 is damaged: the rows of 1 clients, the first is client 7"):
        read_rows(path, "cohort0", ids(7), ids(3))
    with pytest.raises(CheckpointError, match="no row 20 of cohort0"):
        read_rows(path, "cohort0", ids(120), ids(20))


def test_threads_write_and_read_side_by_side(run):
    worlds = [World(run / str(number), TWO, number) for number in range(4)]

    def work(world: World) -> str:
        for round in range(4):
            world.save(round, ranks=2)
            world.train(world.some())
        world.save(4, ranks=2)
        return run_folder.digest(world.run, 4)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, worlds)) == [world.digest() for world in worlds]


def test_digest_is_the_sha256_of_its_definition():
    server = {"b": np.float32([1.5, -2]), "a/n": np.array(7)}
    clients = {
        "cohort1": (ids(1), {"flag": np.array([[True, False]])}),
        "cohort0": (ids(2, 0), {"w": np.int32([[[3]], [[4]]])}),
    }
    content = hashlib.sha256()
    content.update(b"server a/n int64 scalar\n" + (7).to_bytes(8, "little"))
    content.update(b"server b float32 2\n" + bytes.fromhex("0000c03f000000c0"))
    content.update(b"client 0 w int32 1x1\n" + (4).to_bytes(4, "little"))
    content.update(b"client 1 flag bool 2\n" + b"\1\0")
    content.update(b"client 2 w int32 1x1\n" + (3).to_bytes(4, "little"))
    assert digest_of_blocks(server, [clients]) == content.hexdigest()
    big_endian = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in server.items()}
    assert digest_of_blocks(big_endian, [clients]) == content.hexdigest()


def test_digest_does_not_depend_on_ranks_rounds_or_the_number_of_clients_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_MOST_AT_ONCE", 64)
    digests = set()
    for ranks, parts in ((1, 1), (5, 1), (3, 4)):
        world = World(tmp_path / f"{ranks}_{parts}", [0, 1] * 75, 3)  # more than are read at once
        world.rng = np.random.default_rng(ranks)
        for round in range(parts):
            world.save(round, ranks)
            world.changed[:] = world.rng.random(world.n) < 0.5  # written again, with the same content
        digests.add(run_folder.digest(world.run, parts - 1))
    assert digests == {world.digest()}


def test_digest_detects_any_difference():
    server = {"a": np.float32([1, 2])}
    clients = {"cohort0": (ids(0, 1), {"w": np.float32([[1], [2]])})}
    variants = [
        ({"a": np.float32([[1, 2]])}, clients),
        ({"b": np.float32([1, 2])}, clients),
        ({"a": np.float32([1, 2]).view(np.int32)}, clients),
        ({"a": np.nextafter(np.float32([1, 2]), np.float32(3))}, clients),
        (server, {"cohort0": (ids(1, 0), clients["cohort0"][1])}),
        (server, {"cohort0": (ids(0, 2), clients["cohort0"][1])}),
        (server, {}),
    ]
    digests = {digest_of_blocks(state, [rows]) for state, rows in [(server, clients), *variants]}
    assert len(digests) == 1 + len(variants)


def test_reading_names_what_is_missing(run):
    with pytest.raises(CheckpointError, match=r"run is no folder; name the folder that `pflmpi run` printed"):
        verify.find_newest_good(run)
    world = World(run, ONE, 0)
    (run / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"no checkpoint: it holds notes\.txt, and no round_00000\.h5"):
        verify.find_newest_good(run)
    assert run_folder.rounds(run) == [] == run_folder.rounds(run / "nowhere")
    world.save(0, ranks=1)
    with pytest.raises(CheckpointError, match=r"round_00007\.h5 is missing"):
        run_folder.read_server(run, 7)
    with pytest.raises(CheckpointError, match="has clients 0 to 11; client 12 was requested"):
        run_folder.read_clients(run, 0, ids(3, 12))


def test_reading_needs_no_write_permission_and_no_lock(run):
    world = World(run, ONE, 0)
    world.save(0, ranks=1)
    descriptors = [os.open(path, os.O_RDONLY) for path in (run / "round_00000.h5", shard_path(run, 0, 0))]
    for descriptor in descriptors:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert run_folder.digest(run, 0) == world.digest()
    for descriptor in descriptors:
        os.close(descriptor)


def test_the_rows_of_many_small_clients_are_found_at_once_for_the_digest(run, monkeypatch):
    """Finding the rows of a block takes time by the number of all clients."""
    world = World(run, [0] * 500 + [1] * 500, 0)
    world.save(0, ranks=2)
    blocks, rows_of = [], run_folder.read_clients_of_layout

    def counting(run: Path, layout: Layout, clients: np.ndarray) -> ClientRows:
        blocks.append(len(clients))
        return rows_of(run, layout, clients)

    monkeypatch.setattr(run_folder, "read_clients_of_layout", counting)
    assert run_folder.digest(run, 0) == world.digest() and blocks == [1000]
    monkeypatch.setattr(digest, "_MOST_AT_ONCE", 64)
    assert run_folder.digest(run, 0) == world.digest() and max(blocks[1:]) == 64
