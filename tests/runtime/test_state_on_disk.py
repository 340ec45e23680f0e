"""Clients' state in a mapped file: the same bits as in memory, nothing left behind, one clear error where it fails."""

import errno
import mmap
import os

import numpy as np
import pytest
import torch
import yaml

import quick_run
from pflmpi.experiment import run as experiment
from pflmpi.runtime.client_rows import empty_rows
from pflmpi.runtime.client_state import allocate


def on_disk(**more):
    return quick_run.settings(runtime={"state": "disk"}, **more)


@pytest.mark.parametrize("init", ["shared", "per_client"])
def test_the_bits_are_those_of_memory_on_any_number_of_ranks_and_after_a_resume(tmp_path, init):
    training = {"init": init, "momentum": 0.5, "keep_optimizer": True}
    expected = quick_run.run(quick_run.settings(training=training), tmp_path / "memory")
    for ranks in (1, 3):
        assert quick_run.run(on_disk(training=training), tmp_path / f"disk{ranks}", ranks) == expected
    quick_run.run(quick_run.settings(training={**training, "rounds": 1}), tmp_path / "resumed")
    change = ("training.rounds=3", "runtime.state=disk", f"runtime.scratch={tmp_path}")
    assert quick_run.resume(tmp_path / "resumed", change, ranks=2) == expected


def test_the_file_has_no_name_and_takes_room_only_for_clients_that_trained(tmp_path):
    """100 GB, if all had; 1,000 have a reply."""
    template = {"model": torch.empty(250_000, device="meta"), "received": {"head": torch.empty(10, device="meta")}}
    rows = empty_rows(np.arange(100_000), template, tmp_path)
    rows.put(np.arange(1000), {"received": {"head": torch.ones(1000, 10)}})
    rows.begin(rows.clients, "model", torch.ones(1, 250_000))
    rows.put(np.array([7, 99_999]), {"model": torch.full((2, 250_000), 2.0)})
    assert rows.get(np.array([6, 7, 99_999]))["model"].sum(1).tolist() == [250_000.0, 500_000.0, 500_000.0]
    taken = os.fstat(rows.storage._file)
    assert 6_000_000 <= 512 * taken.st_blocks < 8_000_000 and taken.st_size > 100e9
    assert not list(tmp_path.iterdir())


def test_the_state_of_a_run_is_in_the_folder_that_was_named(tmp_path, monkeypatch):
    folders = []

    def watched(*arguments):
        folders.append(arguments[-1])
        return allocate(*arguments)

    monkeypatch.setattr(experiment, "allocate", watched)
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    for number, runtime in enumerate(({}, {"state": "disk"}, {"state": "disk", "scratch": "$NODE_DISK"})):
        quick_run.run(quick_run.settings(training={"rounds": 1}, runtime=runtime), tmp_path / str(number))
    assert folders == [None, tmp_path / "1", tmp_path / "scratch"]
    assert not list((tmp_path / "scratch").iterdir())


def test_a_full_disk_ends_the_run_with_one_line_and_it_resumes(tmp_path, monkeypatch, capfd):
    expected = quick_run.run(quick_run.settings(), tmp_path / "memory")
    config, run, left = tmp_path / "config.yaml", tmp_path / "run", [4]
    config.write_text(yaml.safe_dump(on_disk()))

    def limited(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", limited)  # 3 clients train in a round
    assert quick_run.command(["run", str(config), "--out", str(run), "--quiet", "--ranks", "1"]) == 3
    error = capfd.readouterr().err
    assert f"No space left on device while the state of clients was written in {run}, because of" in error
    assert "free space, or name another folder as runtime.scratch" in error and "Traceback" not in error
    monkeypatch.undo()
    assert quick_run.resume(run) == expected


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        (
            {"scratch": "."},
            "runtime.scratch = '.' is for runtime.state = 'disk', which is 'memory'; set that, or leave",
        ),
        (
            {"state": "disk", "scratch": "./nowhere"},
            "runtime.scratch = './nowhere': nowhere is no folder here; name one",
        ),
        ({"state": "disk", "scratch": "$NOT_SET/x"}, "runtime.scratch = '$NOT_SET/x': $NOT_SET/x is no folder here"),
        ({"state": "tape"}, "runtime.state = 'tape'"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path, capfd, runtime, words):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(quick_run.settings(runtime=runtime)))
    assert quick_run.command(["run", str(config), "--out", str(tmp_path / "run"), "--ranks", "1"]) == 2
    assert words in capfd.readouterr().err and not (tmp_path / "run").exists()


def test_a_file_system_that_cannot_map_files_is_named(tmp_path, monkeypatch, capfd):
    def refused(*arguments, **options):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(on_disk()))
    monkeypatch.setattr("pflmpi.runtime.client_rows.mmap", mmap_that(refused))
    assert quick_run.command(["run", str(config), "--out", str(tmp_path / "run"), "--quiet", "--ranks", "1"]) == 2
    error = capfd.readouterr().err
    assert f"cannot be kept in {tmp_path / 'run'}: No such device; name another folder as runtime.scratch" in error


def mmap_that(opens):
    """The module `mmap` with another `mmap.mmap`."""
    return type("mmap", (), {**vars(mmap), "mmap": staticmethod(opens)})
