"""Who writes the rows of a checkpoint: one rank of a node for those with few; rank 0 waits for no shard without end."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import quick_run
from pflmpi.errors import RunError
from pflmpi.runtime import checkpoints
from pflmpi.runtime.checkpoints import Checkpoints, choose_shard_writers, group_by_writer
from pflmpi.store import verify
from pflmpi.store.names import shard_path
from pflmpi.store.shard import write_shard

RAW = quick_run.settings(
    algorithm={"name": "local"},
    model=[{"name": "mlp", "hidden": 8}, {"name": "mlp", "hidden": 9}],
    checkpoint={"keep": 0},
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run on one rank."""
    return quick_run.run(RAW, tmp_path_factory.mktemp("alone") / "run")


def shards(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "shards").iterdir())


def test_ranks_of_a_node_with_few_rows_share_a_shard(alone, tmp_path):
    """Rank 0 has no clients: rank 1 writes."""
    assert quick_run.run(RAW, tmp_path / "run", ranks=3) == alone
    assert shards(tmp_path / "run") == [f"round_{number:05d}_rank_001.h5" for number in range(4)]
    assert quick_run.resume(tmp_path / "run", ("training.rounds=3",), ranks=2) == alone


def test_a_rank_with_many_rows_writes_its_own(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_MIN_OWN_SHARD", 1)
    assert quick_run.run(RAW, tmp_path / "run", ranks=3) == alone
    assert shards(tmp_path / "run")[:2] == ["round_00000_rank_001.h5", "round_00000_rank_002.h5"]


@pytest.mark.parametrize(
    ("sizes", "hosts", "expected"),
    [
        ([5, 0, 7], "aaa", [0, 1, 0]),
        ([5, 6, 7, 8], "abab", [0, 1, 0, 1]),
        ([30, 30, 30, 5], "aaaa", [0, 0, 2, 2]),  # 60 bytes at most in one
        ([5, 40, 5], "aaa", [0, 1, 0]),  # a shard of its own from 40 bytes on
    ],
)
def test_who_writes_follows_from_sizes_and_nodes(sizes, hosts, expected, monkeypatch):
    monkeypatch.setattr(checkpoints, "_MIN_OWN_SHARD", 40)
    monkeypatch.setattr(checkpoints, "_MAX_SHARED_SHARD", 60)
    assert choose_shard_writers(sizes, hosts) == expected


def test_clients_are_written_in_ascending_order():
    written = group_by_writer([np.array([2, 5]), np.array([], np.int64), np.array([1, 9])], [0, 1, 0])
    assert [ids.tolist() for ids in written] == [[1, 2, 5, 9], [], []]


def test_a_shard_that_an_earlier_start_has_left_is_not_taken_for_one_of_the_run(alone, tmp_path, monkeypatch):
    """Killed before its first checkpoint, a run leaves shards and no round file."""
    monkeypatch.setattr(checkpoints, "_MIN_OWN_SHARD", 1)
    (tmp_path / "run").mkdir()
    for rank in (1, 2):
        write_shard(shard_path(tmp_path / "run", 0, rank), {"cohort0": (np.array([rank]), {})})
    late = checkpoints.write_shard
    monkeypatch.setattr(checkpoints, "write_shard", lambda *arguments: (time.sleep(0.2), late(*arguments)))
    assert quick_run.run(RAW, tmp_path / "run", ranks=3) == alone
    assert verify.problems(tmp_path / "run", 0) == []


def waiting(tmp_path: Path, check: Any = lambda: None) -> Any:
    return SimpleNamespace(_closing=threading.Event(), _lock=SimpleNamespace(check=check))


def test_the_wait_for_a_shard_ends_when_the_run_does(tmp_path):
    rank = waiting(tmp_path)
    threading.Timer(0.05, rank._closing.set).start()
    with pytest.raises(RunError, match="is missing, which another rank writes"):
        Checkpoints._wait_for(rank, tmp_path / "shard.h5")


def test_the_wait_for_a_shard_ends_when_the_lock_is_lost(tmp_path):
    def check() -> None:
        raise RunError("taken over")

    with pytest.raises(RunError, match="taken over"):
        Checkpoints._wait_for(waiting(tmp_path, check), tmp_path / "shard.h5")


def test_the_wait_for_a_shard_ends_after_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_SHARD_TIMEOUT", 0.05)
    with pytest.raises(RunError, match=r"shard.h5 is missing"):
        Checkpoints._wait_for(waiting(tmp_path), tmp_path / "shard.h5")


def test_a_shard_is_seen_where_the_system_remembers_that_its_name_was_missing(tmp_path, monkeypatch):
    """As NFS does, until this host changes the folder."""
    shard, missing = tmp_path / "shard.h5", {}

    def exists(path):
        changed = tmp_path.stat().st_mtime_ns
        if path == shard and not missing:
            missing[changed] = True
            os.close(os.open(shard, os.O_CREAT))
            os.utime(tmp_path, ns=(changed, changed))  # another host's change is not seen
            return False
        return changed not in missing

    monkeypatch.setattr(Path, "exists", exists)
    Checkpoints._wait_for(waiting(tmp_path), shard)
    assert os.listdir(tmp_path) == ["shard.h5"]
