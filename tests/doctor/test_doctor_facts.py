"""What only running can tell: clocks, folders, stale files."""

import fcntl
import threading
import time
from pathlib import Path

import pytest

import thread_transport
from pflmpi.doctor import collect
from pflmpi.doctor.collect import existing, flock_error, hdf5_error, inspect_folder, probe_file
from pflmpi.doctor.facts import Clock
from pflmpi.transports.base import Transport


def test_the_clock_of_each_rank_is_compared_with_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    fast: dict[int, float] = {}
    real = time.time

    def clocks(one: Transport) -> list[Clock]:
        fast[threading.get_ident()] = 100.0 * one.rank
        return collect.compare_clocks(one)

    monkeypatch.setattr(collect.time, "time", lambda: real() + fast[threading.get_ident()])
    found = thread_transport.run_ranks(3, clocks)
    assert found[1:] == [[], []]
    for rank, clock in enumerate(found[0]):
        assert abs(clock.ahead - 100.0 * rank) <= clock.within < 50.0


def test_the_folder_of_a_run_to_come_is_the_nearest_one_that_is_there(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path


def test_a_file_that_somebody_has_locked_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert flock_error(path) == "" == hdf5_error(path)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert flock_error(path) == "Resource temporarily unavailable"
        assert "unable to lock file" in hdf5_error(path)


def test_rank_0s_file_is_looked_for(tmp_path: Path) -> None:
    with probe_file(tmp_path) as name:
        found = inspect_folder(tmp_path, name)
        assert (found.seen, found.lock_seen) == (True, True)
        (tmp_path / name).unlink()
        (tmp_path / name).touch()  # as with locks that hold on another host only
        found = inspect_folder(tmp_path, name)
        assert (found.seen, found.lock_seen) == (True, False)
        assert inspect_folder(tmp_path, "other").seen is False
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_being_written_is_not_left_behind(tmp_path: Path) -> None:
    shards = tmp_path / "run" / "shards"
    shards.mkdir(parents=True)
    names = ("dead", "growing", "open")
    dead, growing, held = (shards / f"round_0000{number}_rank_000.h5.tmp" for number, _ in enumerate(names))
    for path in (dead, growing, held):
        path.touch()
    with held.open("ab"):
        before = collect.unfinished(tmp_path)
        assert before.keys() == {str(dead), str(growing), str(held)}
        growing.write_bytes(b"more")
        assert collect.stale_files(tmp_path, before)["unfinished"] == (str(dead),)
