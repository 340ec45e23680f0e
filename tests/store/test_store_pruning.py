"""Deleting old checkpoints never harms those that stay."""

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from pflmpi.store import pruning, run_folder, verify
from pflmpi.store.names import shard_path
from store_world import Dying, Killed, World

ONE = [0] * 12
TWO = [0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_pruning_leaves_the_newest_rounds_whole_and_nothing_else(run, keep, seed):
    world = World(run, TWO, seed)
    digests = {}
    for round in range(6):
        world.save(round, ranks=int(world.rng.integers(1, 4)))
        digests[round] = world.digest()
        pruning.prune(run, keep)
        kept = list(range(round + 1))[-keep:]
        assert run_folder.rounds(run) == kept
        needed = {name for number in kept for name in run_folder.read_layout(run, number).files}
        assert {f"shards/{path.name}" for path in (run / "shards").iterdir()} == needed
        for number in kept:
            assert verify.problems(run, number) == []
            assert run_folder.digest(run, number) == digests[number]
        world.train(world.some())


def test_pruning_with_zero_keeps_all_rounds(run):
    world = World(run, ONE, 0)
    for round in range(4):
        world.save(round, ranks=2)
        world.train(world.some())
    before = sorted(path.name for path in run.rglob("*"))
    pruning.prune(run, 0)
    assert sorted(path.name for path in run.rglob("*")) == before


def test_pruning_spares_what_other_ranks_are_writing(run):
    world = World(run, ONE, 0)
    world.save(0, ranks=1)
    world.train(np.arange(world.n))
    world.save(1, ranks=1)
    early = [run / "shards" / name for name in ("round_00002_rank_001.h5", "round_00002_rank_002.h5.tmp", "notes.h5")]
    for path in early:
        path.write_bytes(b"part")
    pruning.prune(run, 1)
    assert all(path.exists() for path in early)
    assert not shard_path(run, 0, 0).exists() and verify.problems(run, 1) == []


def test_pruning_does_not_count_a_damaged_round_nor_risk_its_shards(run):
    world = World(run, ONE, 0)
    for round in range(3):
        world.save(round, ranks=1)
        world.train(world.some())
    (run / "round_00002.h5").write_bytes(b"not HDF5")
    shards = sorted((run / "shards").iterdir())
    pruning.prune(run, 1)
    assert run_folder.rounds(run) == [1, 2]
    assert sorted((run / "shards").iterdir()) == shards
    assert verify.find_newest_good(run)[0] == 1


def test_killed_while_pruning_every_remaining_round_is_intact(run, tmp_path):
    world = World(run, TWO, 0)
    for round in range(5):
        world.save(round, ranks=2)
        world.train(np.arange(world.n) if round == 2 else world.some())
    for step in range(100):
        copy = tmp_path / f"copy{step}"
        shutil.copytree(run, copy)
        with pytest.MonkeyPatch.context() as patch:
            dying = Dying(patch, step)
            with contextlib.suppress(Killed):
                pruning.prune(copy, 2)
        assert all(verify.problems(copy, round) == [] for round in run_folder.rounds(copy))
        pruning.prune(copy, 2)
        assert run_folder.rounds(copy) == [3, 4]
        needed = {name for number in (3, 4) for name in run_folder.read_layout(copy, number).files}
        assert {f"shards/{path.name}" for path in (copy / "shards").iterdir()} == needed
        if not dying.dead:
            break
    assert step == (3 + 1) + 6  # three rounds and a flush of their folder, and the six shards that only they need


def test_resuming_discards_later_rounds_shards_probes_and_partial_files(run):
    world = World(run, ONE, 0)
    for round in range(3):
        world.save(round, ranks=2)
        world.train(world.some())
    for name in (
        "round_00003.h5.tmp",
        "probe_00001.h5",
        "probe_00002.h5",
        "shards/round_00003_rank_000.h5",
        "shards/round_00003_rank_001.h5.tmp",
        "metrics.0badcafe.csv.tmp",
        "keep.txt",
    ):
        (run / name).write_bytes(b"part")
    pruning.discard_after(run, 1)
    assert run_folder.rounds(run) == [0, 1]
    assert verify.problems(run, 0) == verify.problems(run, 1) == []
    left = {path.name for path in run.rglob("*")}
    assert {"keep.txt", "probe_00001.h5"} <= left
    assert not [name for name in left if name.endswith(".tmp") or "00002" in name or "00003" in name]
