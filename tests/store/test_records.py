"""Records: packed, checked, and turned into the HDF5 that ranks would have written themselves."""

import contextlib
import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pflmpi.cli import main
from pflmpi.errors import RunError
from pflmpi.store import run_folder
from pflmpi.store.lock import taking
from pflmpi.store.names import shard_path
from pflmpi.store.records import conversion, record, segments, sharing
from pflmpi.store.records.conversion import convert, pending
from pflmpi.store.records.record import Record
from pflmpi.store.records.recovery import recover_records
from pflmpi.store.records.segments import RecordFile
from store_world import Dying, Killed, World, alike

COHORTS = [0, 1, 1, 0, 2, 0, 1, 0]


def made(round: int) -> Record:
    rng = np.random.default_rng(round)
    once = np.broadcast_to(rng.random((1, 3)), (5, 3))
    arrays = {
        "once": once,
        "same": once,
        "number": np.array(7.5),
        "empty": np.empty((0, 4), np.int16),
        "flags": rng.random(11) < 0.5,
        "names": np.array([b"a", b"bcd"]),
        "turned": rng.random((3, 5)).T,
    }
    return Record(round, {"text": "ä", "numbers": [1, 2]}, arrays)


def recorded(run: Path, rounds: int) -> Path:
    file = RecordFile(run, 0)
    for round in range(rounds):
        file.append(made(round))
    return next(segments.folder(run).glob("*.rec"))


def whole(run: Path) -> list[int]:
    """The rounds whose records can be read, each of which is what was written."""
    found = []
    for one in segments.segments(run):
        for place in one.places:
            if (there := one.read(place)) is not None:
                assert there.about == made(there.round).about
                alike(there.arrays, made(there.round).arrays)
                found.append(there.round)
    return found


def test_a_record_gives_back_what_it_was_made_of(tmp_path: Path) -> None:
    path = recorded(tmp_path, 3)
    assert whole(tmp_path) == [0, 1, 2]
    first = segments.segments(tmp_path)[0]
    found = first.read(first.places[0])
    assert found is not None
    assert found.arrays["once"] is found.arrays["same"] and found.arrays["once"].strides[0] == 0
    assert path.stat().st_size < 3 * 1000


def test_a_record_cut_anywhere_or_with_a_flipped_bit_is_none_and_those_before_it_stay(tmp_path: Path) -> None:
    path = recorded(tmp_path, 3)
    content = path.read_bytes()
    ends = [place.end for place in segments.segments(tmp_path)[0].places]
    assert ends[-1] == len(content)
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert whole(tmp_path) == [round for round in range(3) if ends[round] <= length], length
    for position in range(ends[0], ends[1], 5):
        damaged = bytearray(content)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        assert whole(tmp_path) == [0, 2], position


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordFile(tmp_path, 3)
    file.append(made(0))
    real = os.pwritev

    def full(descriptor: int, buffers: list[memoryview], position: int) -> int:
        if position:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, buffers[:1], position)

    before = (path := next(segments.folder(tmp_path).glob("*.rec"))).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
            file.append(made(1))
    assert path.read_bytes() == before
    monkeypatch.setattr(os, "pwritev", lambda descriptor, buffers, at: real(descriptor, [buffers[0][:100]], at))
    file.append(made(2))  # a bit at a time
    assert whole(tmp_path) == [0, 2]


def test_what_ranks_record_becomes_the_files_that_they_would_write(tmp_path: Path) -> None:
    worlds = [World(tmp_path / name, COHORTS, 0) for name in ("recorded", "written")]
    for round in range(4):
        for world in worlds:
            if round:
                world.train(world.some())
        worlds[0].record(round, 1)
        worlds[1].save(round, 1)
    convert(worlds[0].run)
    assert run_folder.rounds(worlds[0].run) == [0, 1, 2, 3] and pending(worlds[0].run) == []
    for round in range(4):
        assert run_folder.verify(worlds[0].run, round) == []
        assert run_folder.digest(worlds[0].run, round) == run_folder.digest(worlds[1].run, round)
        for name in run_folder.read_layout(worlds[1].run, round).files:
            clients = np.arange(len(COHORTS))
            for cohort, (ids, rows) in run_folder.read_clients(worlds[0].run, round, clients).items():
                other = run_folder.read_clients(worlds[1].run, round, clients)[cohort]
                assert (ids == other[0]).all(), name
                alike(rows, other[1])


def test_of_many_rounds_only_those_that_the_run_keeps_become_hdf5(tmp_path: Path) -> None:
    world = World(tmp_path / "run", COHORTS, 0)
    for round in range(9):
        world.train(np.array([round % 8]))
        world.record(round, ranks=3, keep=2)
        if round == 3:
            convert(world.run)
            assert run_folder.rounds(world.run) == [2, 3]
    assert pending(world.run) == [4, 5, 6, 7, 8]
    convert(world.run)
    assert run_folder.rounds(world.run) == [7, 8]
    assert run_folder.verify(world.run, 7) == run_folder.verify(world.run, 8) == []
    assert run_folder.digest(world.run, 8) == world.digest()
    assert pending(world.run) == []


def test_a_record_is_read_to_look_and_to_write_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "run", COHORTS, 0)
    for round in range(3):
        world.train(np.array([round]))
        world.record(round, ranks=2)
    times, read = Counter[tuple[int, int]](), segments.Segment.read

    def counted(self: segments.Segment, place: record.Place) -> Record | None:
        times[self.rank, place.round] += 1
        return read(self, place)

    monkeypatch.setattr(segments.Segment, "read", counted)
    convert(world.run)
    assert run_folder.rounds(world.run) == [0, 1, 2]
    assert max(times[0, round] for round in range(3)) == 3  # to look, for the round file, and for the shard
    assert max(times[1, round] for round in range(3)) == 2


def test_a_round_is_complete_when_all_ranks_have_recorded_it(tmp_path: Path) -> None:
    world = World(tmp_path / "run", COHORTS, 0)
    world.record(0, ranks=3)
    path = max(segments.folder(world.run).glob("*_rank_002.rec"))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    convert(world.run)
    assert run_folder.rounds(world.run) == [] and pending(world.run) == []
    path.write_bytes(content)
    assert pending(world.run) == [0]
    convert(world.run)
    assert run_folder.digest(world.run, 0) == world.digest()


def test_many_ranks_share_shards_and_few_files(tmp_path: Path) -> None:
    world = World(tmp_path / "run", [0] * 300, 0)
    for round in range(3):
        world.train(np.arange(300))
        world.record(round, ranks=100)
    assert len(list(segments.folder(world.run).glob("*.rec"))) <= 100
    convert(world.run)
    assert len(list((world.run / "shards").iterdir())) == 3
    assert run_folder.digest(world.run, 2) == world.digest()


def test_a_rank_with_many_bytes_writes_a_shard_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "OWN", 100)
    monkeypatch.setattr(sharing, "_SHARED", 150)
    assert sharing.first_ranks([60, 0, 101, 60, 40, 100]).tolist() == [0, 1, 2, 0, 4, 4]


def test_long_runs_have_few_files_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MANY", 4)
    world = World(tmp_path / "run", COHORTS, 0)
    for round in range(23):
        world.train(np.array([1]))
        world.record(round, ranks=2, keep=1)
        if round % 5 == 4:
            convert(world.run)
            assert len(list(segments.folder(world.run).glob("*.rec"))) <= 4
    convert(world.run)
    assert run_folder.digest(world.run, 22) == world.digest()


def test_killed_at_any_step_nothing_that_was_recorded_is_lost(tmp_path: Path) -> None:
    for step in range(300):
        world = World(tmp_path / f"run{step}", COHORTS, 0)
        said, digests = -1, []
        with pytest.MonkeyPatch.context() as patch:
            dying = Dying(patch, step)
            with contextlib.suppress(Killed):
                for round in range(4):
                    world.train(np.array([round, round + 1]))
                    digests.append(world.digest())
                    world.record(round, ranks=2, keep=2)
                    said = round
                    if round % 2:
                        convert(world.run)
        convert(world.run)
        if said >= 0:
            done, problems = run_folder.newest_good(world.run)
            assert done >= said and problems == [], (step, done, said, problems)
            assert run_folder.digest(world.run, done) == digests[done]
        if not dying.dead:
            break
    assert said == 3 and step > 30


def test_a_full_disk_while_hdf5_is_written_loses_nothing(tmp_path: Path) -> None:
    world = World(tmp_path / "run", COHORTS, 0)
    world.record(0, ranks=2)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left on device"):
            convert(world.run)
    assert pending(world.run) == [0]
    convert(world.run)
    assert run_folder.digest(world.run, 0) == world.digest()


def test_a_run_that_misses_an_earlier_shard_says_so_and_keeps_its_records(tmp_path: Path) -> None:
    world = World(tmp_path / "run", COHORTS, 0)
    world.record(0, ranks=1)
    convert(world.run)
    segments.clear(world.run)
    world.records.clear()
    shard_path(world.run, 0, 0).unlink()
    world.train(np.array([1]))
    world.record(1, ranks=1)
    convert(world.run)
    with pytest.raises(RunError, match=r"round 1 of .*run is recorded, but files that it needs were moved or deleted"):
        conversion.finish(world.run, 1)
    assert segments.recorded(world.run) == [1]


def test_a_run_that_belongs_to_another_process_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path / "run", COHORTS, 0)
    world.record(0, ranks=1)

    def taken() -> None:
        raise RunError("taken over")

    with pytest.raises(RunError, match="taken over"):
        convert(world.run, taken)
    assert run_folder.rounds(world.run) == []


def test_of_two_processes_one_turns_records_into_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "run", COHORTS, 0)
    world.record(0, ranks=1)
    monkeypatch.setattr(segments, "_PATIENCE", 0.1)
    with segments.exclusive(world.run), pytest.raises(RunError, match="another process turns the records of"):
        convert(world.run)
    convert(world.run)
    assert run_folder.rounds(world.run) == [0]


def test_whoever_reads_a_killed_run_turns_its_records_into_hdf5(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path / "run", COHORTS, 0)
    world.record(0, ranks=2)
    recover_records(world.run)
    assert run_folder.digest(world.run, 0) == world.digest()
    assert sorted(path.name for path in world.run.iterdir()) == ["round_00000.h5", "shards"]
    assert caplog.text == ""


def test_a_run_that_cannot_be_written_says_what_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "run", COHORTS, 0)
    world.record(0, ranks=1)
    world.record(1, ranks=1)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(taking, "write", refuse)
    recover_records(world.run)
    assert caplog.messages == [
        f"{world.run}: checkpoints 0-1 are recorded and not yet HDF5 (Read-only file system); "
        f"make the folder writable, and `pflmpi resume {world.run}` changes that"
    ]
    assert run_folder.rounds(world.run) == []
    caplog.clear()
    assert main(["inspect", str(world.run), "--verify"]) == 2
    assert len([text for text in caplog.messages if "not yet HDF5" in text]) == 1


def test_records_of_another_form_are_no_records(tmp_path: Path) -> None:
    folder = segments.folder(tmp_path)
    folder.mkdir()
    (folder / "round_00000_rank_000.rec").write_bytes(os.urandom(1000))
    (folder / "notes.txt").write_text("mine")
    assert pending(tmp_path) == []
    convert(tmp_path)
    assert record.places(os.open(folder / "round_00000_rank_000.rec", os.O_RDONLY)) == []
