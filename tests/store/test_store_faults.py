"""Whatever happens while a run is written or lies on disk, what was good stays good and what is not is named."""

import contextlib
import copy
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pflmpi import atomic
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.store import checked_hdf5, pruning, run_folder, verify
from store_world import Dying, Killed, World

COHORTS = [0, 1, 1, 0, 2, 0, 1, 0]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A run with two good rounds; round 1 needs shards of both."""
    world = World(tmp_path / "run", COHORTS, 0)
    world.save(0, ranks=2)
    world.train(np.array([0, 1, 3]))
    world.save(1, ranks=2)
    return world


def files(world: World) -> list[str]:
    return ["round_00001.h5", *run_folder.read_layout(world.run, 1).files]


@pytest.mark.parametrize("small", [True, False])
def test_killed_at_any_step_of_a_checkpoint_the_last_one_is_intact_and_the_run_continues(tmp_path, small, monkeypatch):
    outcomes = []
    if not small:  # files are written as large ones are: in pieces
        monkeypatch.setattr(checked_hdf5, "_SMALL", 0)
    begun = World(tmp_path / "begun", COHORTS, 0)
    begun.save(0, ranks=2)
    for step in range(200):
        world = copy.deepcopy(begun)
        world.run = shutil.copytree(begun.run, tmp_path / f"run{step}")
        digests = [world.digest()]
        world.train(np.array([0, 1, 2, 3]))
        digests.append(world.digest())
        with pytest.MonkeyPatch.context() as patch:
            dying = Dying(patch, step)
            with contextlib.suppress(Killed):
                world.save(1, ranks=2)
        done, problems = verify.find_newest_good(world.run)
        outcomes.append(done)
        assert problems == []
        assert run_folder.digest(world.run, done) == digests[done]

        pruning.discard_after(world.run, done)
        world.layout = run_folder.read_layout(world.run, done)
        world.changed[:] = True
        world.save(done + 1, ranks=3)
        assert verify.find_newest_good(world.run) == (done + 1, [])
        assert run_folder.digest(world.run, done + 1) == digests[1]
        assert not list(world.run.rglob("*.tmp"))
        if not dying.dead:
            break
    # Three files: writes, flush, rename, flush of the folder; the checkpoint is there from the last rename on.
    assert outcomes == [0] * (len(outcomes) - 2) + [1, 1]
    assert len(outcomes) == 3 * 4 + 1 if small else len(outcomes) > 20


def test_a_file_cut_anywhere_is_named(world):
    for name in files(world):
        path = world.run / name
        content = path.read_bytes()
        for length in (0, 1, 40, 511, 512, 513, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            problems = verify.problems(world.run, 1)
            assert len(problems) == 1 and name in problems[0] and "damaged" in problems[0], (length, problems)
        path.write_bytes(content + b"\0")
        assert f"{len(content) + 1} bytes long, {len(content)} were written" in verify.problems(world.run, 1)[0]
        path.write_bytes(content)
    assert verify.problems(world.run, 1) == []


def test_a_flipped_bit_anywhere_is_named(world):
    rng = np.random.default_rng(0)
    for name in files(world):
        path = world.run / name
        content = bytearray(path.read_bytes())
        for position in [*range(0, 64, 5), *rng.integers(0, len(content), 20).tolist()]:
            bit = 1 << int(rng.integers(8))
            content[position] ^= bit
            path.write_bytes(content)
            problems = verify.problems(world.run, 1)
            assert len(problems) == 1 and name in problems[0], position
            content[position] ^= bit
        path.write_bytes(content)
    assert verify.problems(world.run, 1) == []


def flip(path: Path, dataset: str) -> None:
    """Flip a bit of the last byte of a dataset."""
    with h5py.File(path) as file:
        position = file[dataset].id.get_offset() + file[dataset].id.get_storage_size() - 1
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_reading_refuses_damaged_values_without_prior_verification(world):
    flip(world.run / "round_00001.h5", "server/head/bias")
    with pytest.raises(CheckpointError, match=r"/server/head/bias in .*round_00001\.h5 is damaged: its CRC-32 is"):
        run_folder.read_server(world.run, 1)
    name = run_folder.read_layout(world.run, 1).files[-1]
    with h5py.File(world.run / name) as file:
        cohort = sorted(file)[0]
        last = int(file[cohort]["client"][-1])
    flip(world.run / name, f"{cohort}/rows/model/body/weight")
    with pytest.raises(CheckpointError, match=f"{name} is damaged: the rows of 1 clients, the first is client {last}"):
        run_folder.read_clients(world.run, 1, np.arange(world.n))
    intact = np.setdiff1d(np.arange(world.n), [last])
    assert sum(len(ids) for ids, _ in run_folder.read_clients(world.run, 1, intact).values()) == 6


def test_a_missing_or_exchanged_shard_is_named(world):
    first, *_, last = run_folder.read_layout(world.run, 1).files
    shutil.copy(world.run / last, world.run / first)
    problems = verify.problems(world.run, 1)
    assert len(problems) == 1 and first in problems[0]
    (world.run / last).unlink()
    problems = verify.problems(world.run, 1)
    assert len(problems) == 2 and problems[1] == f"{world.run / last} is missing"
    with pytest.raises(CheckpointError, match="is missing"):
        run_folder.read_clients(world.run, 1, np.arange(world.n))


def test_a_newer_format_is_refused_with_both_versions(world, monkeypatch):
    world.train(np.array([0]))
    with monkeypatch.context() as patch:
        patch.setattr(checked_hdf5, "FORMAT_VERSION", 99)
        world.save(2, ranks=1)
    assert "its format version is 99, this one reads up to 6; update pflmpi" in verify.problems(world.run, 2)[0]
    with pytest.raises(CheckpointError, match="its format version is 99"):
        run_folder.read_server(world.run, 2)


def test_the_newest_good_round_is_used_and_the_damaged_ones_are_reported(world):
    world.train(np.array([5]))
    world.save(2, ranks=1)
    flip(world.run / "round_00002.h5", "server/head/bias")
    done, problems = verify.find_newest_good(world.run)
    assert done == 1 and len(problems) == 1 and "round_00002.h5 is damaged" in problems[0]
    (world.run / "round_00001.h5").write_bytes(b"")
    done, problems = verify.find_newest_good(world.run)
    assert done == 0 and len(problems) == 2
    shutil.rmtree(world.run / "shards")
    with pytest.raises(CheckpointError, match=r"no good checkpoint among 3: .*round_00002.* is missing; restore"):
        verify.find_newest_good(world.run)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_damaged(code, world, monkeypatch):
    def read(path):
        if path == world.run / files(world)[-1]:
            raise OSError(code, os.strerror(code), str(path))
        return open(path, "rb")

    monkeypatch.setattr(checked_hdf5.regular_file, "open_regular", read)
    with pytest.raises(checked_hdf5.UnreadableError, match=rf"cannot be read: {os.strerror(code)}; make it readable"):
        verify.find_newest_good(world.run)
    assert len(verify.checkpoint(world.run, 1, whole=False)) == 1
    older, problems = verify.find_newest_good(world.run, skips_unreadable=True)  # as readers do
    assert older == 0 and "cannot be read" in problems[0]


def test_a_run_that_goes_on_and_deletes_what_is_looked_at_is_looked_at_again(world, monkeypatch):
    look = verify.problems

    def late(run, round):
        monkeypatch.setattr(verify, "problems", look)
        world.train(np.arange(world.n))
        world.save(2, ranks=1)
        for name in ("round_00000.h5", "round_00001.h5"):
            (run / name).unlink()
        return look(run, round)

    monkeypatch.setattr(verify, "problems", late)
    assert verify.find_newest_good(world.run) == (2, [])


@pytest.mark.parametrize(
    ("small", "call"), [*((True, call) for call in range(3)), *((False, call) for call in range(6))]
)
def test_a_full_disk_damages_nothing_and_leaves_nothing_behind(world, small, call, monkeypatch):
    if not small:
        monkeypatch.setattr(checked_hdf5, "_SMALL", 0)
    before = {path: path.read_bytes() for path in world.run.rglob("*.h5")}
    world.train(np.arange(world.n))
    calls = iter(range(100))
    real = os.pwrite

    def full(descriptor: int, content: Any, position: int) -> int:
        if next(calls) >= call:
            real(descriptor, content[: len(content) // 2], position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*\.h5'"):
            world.save(2, ranks=2)
    assert not list(world.run.rglob("*.tmp"))
    assert {path: path.read_bytes() for path in before} == before
    assert verify.find_newest_good(world.run) == (1, [])


def test_an_error_of_a_library_without_a_number_is_shown(tmp_path):
    (tmp_path / "text.h5").write_text("no HDF5")
    expected = r"cannot write one\.h5: .*file signature not found.*; fix that, or choose another -o"
    with pytest.raises(ConfigError, match=expected), atomic.explain_write_error("one.h5", "choose another -o"):
        h5py.File(tmp_path / "text.h5")


def test_of_two_writers_of_one_file_the_last_to_end_leaves_its_own_whole(tmp_path):
    path = tmp_path / "one.txt"
    with atomic.replacing(path) as first:
        atomic.write_at(first, b"first", 0)
        atomic.write(path, b"second, longer")
        assert path.read_bytes() == b"second, longer"
    assert path.read_bytes() == b"first" and [*tmp_path.iterdir()] == [path]


def test_short_writes_are_continued(world, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, position: real(descriptor, content[:10], position))
    world.train(np.arange(world.n))
    world.save(2, ranks=2)
    assert verify.find_newest_good(world.run) == (2, [])
