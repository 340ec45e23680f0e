"""Clients that have not trained share their first state; what each keeps is as if all had rows of their own."""

import errno
import mmap
import os

import numpy as np
import pytest
import torch
import yaml

import quick_run
from pflmpi import tree
from pflmpi.algorithms.base import initial_client
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.experiment import run as experiment
from pflmpi.learning.task import Task
from pflmpi.runtime.client_state import allocate, allocate_rows, initialise
from pflmpi.store import shard
from pflmpi.tree import Tree
from planned_run import planned

TEMPLATE: Tree = {
    "model": {"weight": torch.empty(3, 2, device="meta"), "bias": torch.empty((), device="meta")},
    "seen": torch.empty(5, dtype=torch.bool, device="meta"),
    "none": {},
    "steps": torch.empty((), dtype=torch.int64, device="meta"),
}
WHO = np.array([2, 3, 7, 8, 20])


def filled():
    """Rows that all begin alike, and the same as whole arrays."""
    rows, arrays = allocate_rows(WHO, TEMPLATE), {}
    for path, leaf in tree.leaves(TEMPLATE):
        first = torch.arange(1, leaf.numel() + 1).view(1, *leaf.shape).to(leaf.dtype)
        rows.set_initial(WHO, path, first)
        arrays[path] = first.expand(len(WHO), *leaf.shape).clone()
    return rows, arrays


def check(rows, arrays, chosen):
    at = torch.tensor(chosen)
    actual = rows.get(WHO[chosen])
    assert actual["none"] == {}
    for path, leaf in tree.leaves(actual):
        assert torch.equal(leaf, arrays[path][at]) and leaf.is_contiguous(), path
    for path, leaf in tree.leaves(rows.compact(WHO[chosen])):
        assert torch.equal(leaf, arrays[path][at]), path


def test_rows_come_to_life_when_they_are_written():
    rows, arrays = filled()
    check(rows, arrays, [0, 2, 4])
    assert all(leaf.stride(0) == 0 for _, leaf in tree.leaves(rows.compact(WHO)))
    new = {"model": {"weight": torch.rand(2, 3, 2), "bias": torch.rand(2)}, "seen": torch.ones(2, 5) > 0}
    rows.put(WHO[[1, 3]], new)
    for path, leaf in tree.leaves(new):
        arrays[path][[1, 3]] = leaf
    for chosen in ([1], [0], [0, 1], [1, 3], [0, 1, 2, 3, 4], [4, 3]):
        check(rows, arrays, chosen)
    assert rows.compact(WHO)["steps"].stride(0) == 0  # was not among what is new
    assert rows.compact(WHO[[0, 2, 4]])["model"]["weight"].stride(0) == 0
    rows.get(WHO)["model"]["weight"].fill_(7)  # a copy
    check(rows, arrays, [0, 1, 2, 3, 4])


def test_clients_that_begin_otherwise_have_rows_of_their_own():
    rows, arrays = filled()
    for path, value in (("model/bias", -1.0), ("steps", 9)):
        rows.set_initial(WHO[1:2], path, torch.full((1,), value, dtype=arrays[path].dtype))
        arrays[path][1] = value
    rows.set_initial(WHO[2:], "model/bias", torch.tensor([1.0]))  # as the others
    rows.set_initial(WHO[3:4], "seen", torch.zeros(1, 5, dtype=torch.bool))
    arrays["seen"][3] = False
    check(rows, arrays, [0, 1, 2, 3, 4])
    assert {path: np.flatnonzero(own).tolist() for path, own in rows.changed.items()} == {
        "model/bias": [1],
        "model/weight": [],
        "seen": [3],
        "steps": [1],
    }


def test_zeros_of_another_sign_are_not_the_same():
    rows = allocate_rows(WHO, {"x": torch.empty((), device="meta")})
    rows.set_initial(WHO[:1], "x", torch.tensor([0.0]))
    rows.set_initial(WHO[1:2], "x", torch.tensor([-0.0]))
    assert torch.signbit(rows.compact(WHO)["x"]).tolist() == [False, True, False, False, False]


def test_what_was_never_filled_is_zero():
    rows = allocate_rows(WHO, TEMPLATE)
    assert all(not leaf.any() for _, leaf in tree.leaves(rows.get(WHO)))
    assert rows.compact(WHO)["model"]["weight"].stride(0) == 0


class ByClient(FedGMH):
    """Asks what kind of number the client is before it looks at it."""

    def init_client(self, task: Task, client: int) -> Tree:
        is_numbered = isinstance(client, int) and client > 0
        return {**super().init_client(task), "number": torch.tensor(client if is_numbered else 0)}


@pytest.mark.parametrize("init", ["shared", "per_client"])
@pytest.mark.parametrize("kind", [FedGMH, ByClient])
def test_the_first_state_is_that_of_each_client(kind, init):
    world = planned(quick_run.settings(training={"init": init}), 1)
    algorithm, task, n = kind(), world.setup.task, world.setup.task.num_clients
    template = tree.like(initial_client(algorithm, task, 0))
    population = allocate(np.zeros(n, np.int64), np.arange(n), [template])
    initialise(population, algorithm, [task])
    own = [(task.of_client(client), client)[: 2 if kind is ByClient else 1] for client in range(n)]
    states = tree.stack([algorithm.init_client(*arguments) for arguments in own])
    for path, leaf in tree.leaves(population.get(np.arange(n))):
        assert torch.equal(leaf, tree.at(states, path)), path
    if kind is ByClient:
        assert population.get(np.arange(n))["number"].tolist() == [*range(n)]
    changed = population.cohorts[0].changed["model/head/weight"]
    assert changed.any() == (init == "per_client")  # one row, where it is the same for all


def test_a_start_that_is_common_to_all_is_made_once(monkeypatch):
    task, calls = planned(quick_run.settings(), 1).setup.task, []
    plain = FedGMH.init_client
    monkeypatch.setattr(FedGMH, "init_client", lambda self, task: calls.append(1) or plain(self, task))
    population = allocate(np.zeros(50, np.int64), np.arange(50), [tree.like(plain(FedGMH(), task))])
    initialise(population, FedGMH(), [task])
    assert len(calls) == 1


def test_what_begins_alike_is_so_again_after_a_continuation(tmp_path, monkeypatch):
    """3 of 7 clients train in a round."""
    monkeypatch.setattr(shard, "_LEAST_REPEATED", 1000)
    made = []

    def watched(*arguments):
        made.append(allocate(*arguments))
        return made[-1]

    monkeypatch.setattr(experiment, "allocate", watched)
    digest = quick_run.run(quick_run.settings(training={"rounds": 3}), tmp_path / "whole")
    quick_run.run(quick_run.settings(training={"rounds": 1}), tmp_path / "run")
    assert quick_run.resume(tmp_path / "run", ("training.rounds=3",)) == digest
    first, short, resumed = (allocated.cohorts[0].changed["model/head/weight"] for allocated in made)
    assert short.sum() == 3 and 3 < first.sum() < 7 and np.array_equal(first, resumed)


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
    rows = allocate_rows(np.arange(100_000), template, tmp_path)
    rows.put(np.arange(1000), {"received": {"head": torch.ones(1000, 10)}})
    rows.set_initial(rows.clients, "model", torch.ones(1, 250_000))
    rows.put(np.array([7, 99_999]), {"model": torch.full((2, 250_000), 2.0)})
    assert rows.get(np.array([6, 7, 99_999]))["model"].sum(1).tolist() == [250_000.0, 500_000.0, 500_000.0]
    status = os.fstat(rows.storage._file)
    assert 6_000_000 <= 512 * status.st_blocks < 8_000_000 and status.st_size > 100e9
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
            "runtime.scratch = '{folder}' is for runtime.state = 'disk', which is 'memory'; set that, or leave",
        ),
        (
            {"state": "disk", "scratch": "./nowhere"},
            "runtime.scratch = '{folder}/nowhere': {folder}/nowhere is no folder here; name one",
        ),
        ({"state": "disk", "scratch": "$NOT_SET/x"}, "$NOT_SET/x: the variable NOT_SET is not set; set it"),
        ({"state": "tape"}, "runtime.state = 'tape'"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path, capfd, runtime, words):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(quick_run.settings(runtime=runtime)))
    assert quick_run.command(["run", str(config), "--out", str(tmp_path / "run"), "--ranks", "1"]) == 2
    assert words.format(folder=tmp_path) in capfd.readouterr().err and not (tmp_path / "run").exists()


def test_a_file_system_that_cannot_map_files_is_named(tmp_path, monkeypatch, capfd):
    def refused(*arguments, **options):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(on_disk()))
    monkeypatch.setattr("pflmpi.runtime.client_state.mmap", mmap_that(refused))
    assert quick_run.command(["run", str(config), "--out", str(tmp_path / "run"), "--quiet", "--ranks", "1"]) == 2
    error = capfd.readouterr().err
    assert f"cannot be kept in {tmp_path / 'run'}: No such device; name another folder as runtime.scratch" in error


def mmap_that(opens):
    """The module `mmap` with another `mmap.mmap`."""
    return type("mmap", (), {**vars(mmap), "mmap": staticmethod(opens)})
