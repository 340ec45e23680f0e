"""A checkpoint in one file, and what travels alone: opened by plain h5py, and h5dump where installed."""

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import quick_run
from described import about, has_values
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5, checksums, one_file, run_folder
from pflmpi.store.layout import Layout
from pflmpi.store.names import shard_path
from pflmpi.store.round_file import ReceivedMessage, RoundContent, write_round
from store_world import TEMPLATES, Dying, Killed, World, write_metrics

COHORTS = {"one": [0] * 12, "two": [0, 1, 1, 0, 0, 1, 0], "with nothing": [0, 2, 0, 2, 0], "nothing": [2] * 4}


def ignore(done: int, total: int) -> None:
    """No progress is shown."""


def written(path: Path, world: World, round: int, compress: bool = False) -> h5py.File:
    one_file.write(path, world.run, round, compress, ignore)
    return h5py.File(path)


def datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    arrays: dict[str, h5py.Dataset] = {}
    file.visititems(lambda path, item: arrays.update({path: item}) if isinstance(item, h5py.Dataset) else None)
    return arrays


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("cohort_of", COHORTS.values(), ids=COHORTS)
def test_one_file_holds_all_of_a_checkpoint_by_itself(cohort_of, compress, tmp_path, monkeypatch):
    monkeypatch.setattr(one_file, "_AT_ONCE", 100)  # so that there are several pieces
    world = World(tmp_path / "run", cohort_of, 1)
    for round in range(3):
        world.train(world.some())
        world.save(round, ranks=3)
    with written(tmp_path / "one.h5", world, 2, compress) as file:
        shutil.rmtree(world.run)
        content = about(file)
        assert content["content"] == "complete" and content["run"]["round"] == 2 and content["run"]["share"] == 0.5
        for path, dataset in datasets(file).items():
            assert not dataset.is_virtual and dataset.external is None and dataset.file == file, path
            assert isinstance(file.get(path, getlink=True), h5py.HardLink)
            if has_values(dataset):
                assert content["arrays"][path]["crc32"] == checksums.crc32(dataset[()]), path
        for cohort, leaves in world.state.items():
            group = file["clients"] if len(world.state) == 1 else file["clients"].get(cohort, {})
            assert len(world.state) == 1 or not leaves or group["client"][()].tolist() == world.ids[cohort].tolist()
            for path, array in leaves.items():
                np.testing.assert_array_equal(group[path][()], array, strict=True)
                assert group[path].compression == ("gzip" if compress and array.size else None)
                axis = "client" if len(world.state) == 1 else f"{cohort}_client"
                assert not array.size or group[path].dims[0][0] == file[axis], path
    assert one_file.digest(tmp_path / "one.h5") == world.digest()


@pytest.mark.parametrize("cohort_of, name", [([0] * 5, "client"), ([0] * 5, "seen/client"), ([0, 1, 0], "seen/client")])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_an_array_that_is_called_client_is_one_like_others(cohort_of, name, shape, tmp_path, monkeypatch):
    template = {name: (shape, np.dtype(np.int64)), "other": ((3,), np.dtype(np.float32))}
    monkeypatch.setattr("store_world.TEMPLATES", [template, *TEMPLATES[1:]])
    world = World(tmp_path / "run", cohort_of, 1)
    world.save(0, ranks=1)
    written(tmp_path / "one.h5", world, 0).close()
    assert one_file.digest(tmp_path / "one.h5") == world.digest() == run_folder.digest(world.run, 0)


def test_few_clients_are_read_at_a_time(tmp_path, monkeypatch):
    world = World(tmp_path / "run", [0] * 40, 0)
    world.save(0, ranks=1)
    row = sum(array.nbytes // 40 for array in world.state["cohort0"].values())
    monkeypatch.setattr(one_file, "_AT_ONCE", 9 * row)
    sizes, rows_of = [], one_file.run_folder.read_clients_of_layout

    def counting(run: Path, layout: Any, clients: np.ndarray) -> Any:
        sizes.append(len(clients))
        return rows_of(run, layout, clients)

    monkeypatch.setattr(one_file.run_folder, "read_clients_of_layout", counting)
    one_file.write(tmp_path / "one.h5", world.run, 0, False, ignore)
    assert sizes == [9, 9, 9, 9, 4]


def test_messages_that_the_server_keeps_too_are_stored_once(tmp_path):
    shared, own = np.arange(6.0), np.arange(8.0).reshape(4, 2)
    messages = {"model": ReceivedMessage({"w": shared}, own=False), "mean": ReceivedMessage({"w": own}, own=True)}
    content = RoundContent(3, {"w": shared}, received=messages, metrics_file=write_metrics(tmp_path, 3))
    layout = Layout.unwritten(np.zeros(4, np.int64))
    write_round(tmp_path, content, layout, {"cohort0": {}}, {"config": ""})
    one_file.write(tmp_path / "one.h5", tmp_path, 3, False, ignore)
    with h5py.File(tmp_path / "one.h5") as file:
        assert file["received/model/w"] == file["server/w"] and about(file)["own"]["mean"]
        assert file["received/mean/w"][()].tolist() == own.tolist()


def test_a_process_that_dies_leaves_no_half_file_under_the_name(tmp_path, monkeypatch):
    world = World(tmp_path / "run", [0] * 6, 0)
    world.save(0, ranks=2)
    path, step = tmp_path / "one.h5", 0
    while True:
        with monkeypatch.context() as patch:
            Dying(patch, step)
            try:
                one_file.write(path, world.run, 0, False, ignore)
                break
            except Killed:
                pass
        if path.exists():  # only its name was not flushed
            assert checked_hdf5.find_damage(path) is None
            path.unlink()
        step += 1
    assert step > 3 and one_file.digest(path) == world.digest()


def test_a_damaged_shard_or_index_is_not_copied(tmp_path):
    world = World(tmp_path / "run", [0] * 6, 0)
    world.save(0, ranks=1)
    path = shard_path(world.run, 0, 0)
    with h5py.File(path, "r+") as file:
        file["cohort0/rows/seen"][2, 0] ^= True
    with pytest.raises(CheckpointError, match="first is client 2"):
        one_file.write(tmp_path / "one.h5", world.run, 0, False, ignore)
    with h5py.File(world.run / "round_00000.h5", "r+") as file:
        file["server/head/bias"][0] += 1
    with pytest.raises(CheckpointError, match=r"round_00000.h5 is damaged: its CRC-32 is"):
        one_file.write(tmp_path / "one.h5", world.run, 0, False, ignore)
    assert list(tmp_path.iterdir()) == [world.run]


# --- the commands -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("travelling") / "run"
    quick_run.run(quick_run.settings(checkpoint={"keep": 0}), folder, ranks=2)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def booleans(run: Path) -> np.ndarray:
    critical: np.ndarray = run_folder.read_clients(run, 3, np.arange(7))["cohort0"][1]["critical/weight"]
    return critical


def dumped(path: Path) -> set[str]:
    """The values of an array of booleans, as h5dump prints them."""
    words = ["h5dump", "-y", "-w", "1", "-d", "/clients/critical/weight", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    data = done.stdout.partition("DATA {")[2].partition("}")[0]
    return set(data.replace(",", " ").split())


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="needs h5dump (package hdf5-tools)")
def test_h5dump_reads_a_lone_file_a_moved_run_a_run_without_a_shard_and_one_file(run, tmp_path):
    assert main(["export", str(run), "--all", "-o", str(tmp_path / "one.h5")]) == 0
    lone = Path(shutil.copy(run / "round_00003.h5", tmp_path))
    moved = run.rename(tmp_path / "elsewhere")
    assert dumped(tmp_path / "one.h5") == dumped(moved / "round_00003.h5") == {"TRUE", "FALSE"}
    assert dumped(lone) == {"MISSING"}
    newest = run_folder.read_layout(moved, 3)
    (moved / next(name for name in newest.files if name not in run_folder.read_layout(moved, 2).files)).unlink()
    assert dumped(moved / "round_00003.h5") == {"TRUE", "FALSE", "MISSING"}, "only what is lost is missing"


def test_an_exported_checkpoint_needs_nothing_else(run, tmp_path, capfd):
    exported, digest = tmp_path / "one.h5", quick_run.digest(run)
    assert main(["export", str(run), "--all", "--compress", "-o", str(exported)]) == 0
    assert "round 3 of fedgmh, 7 clients" in capfd.readouterr().out
    expected, history = booleans(run), (run / "metrics.csv").read_bytes()
    shutil.rmtree(run)
    with h5py.File(exported) as file:
        dataset = file["clients/critical/weight"]
        assert dataset.dtype == bool and np.array_equal(dataset[()], expected) and expected.any()
        assert about(file)["metrics_text"] == history.decode() and file["partition/train_by_class"].shape == (7, 10)
    assert main(["inspect", str(exported), "--digest"]) == 0
    assert capfd.readouterr().out == f"{digest}\n"
    assert main(["inspect", str(exported)]) == 0
    assert "clients/critical/weight" in capfd.readouterr().out
    assert main(["inspect", str(exported), "--verify"]) == 0
    exported.write_bytes(exported.read_bytes()[:-1] + b"?")
    assert main(["inspect", str(exported), "--verify"]) == 2
    assert "is damaged" in capfd.readouterr().err


def test_an_array_that_a_tool_has_changed_is_found_though_the_file_has_its_checksum(run, tmp_path, capfd):
    """In a checkpoint in one file, and in the files of a run."""
    exported = tmp_path / "one.h5"
    assert main(["export", str(run), "--all", "-o", str(exported)]) == 0
    newest = max(run.glob("round_*.h5"))
    for path, words in ((exported, [str(exported)]), (newest, [str(run)])):

        def fill(changed: checked_hdf5.HDF5Writer, source: Path = path) -> None:
            with h5py.File(source) as file:
                for name in file:
                    file.copy(name, changed.file)
                changed.about |= about(file)
            changed.file["metrics/correct"][0] += 1

        checked_hdf5.write(tmp_path / "changed.h5", fill)
        (tmp_path / "changed.h5").replace(path)
        capfd.readouterr()
        assert main(["inspect", *words, "--verify"]) == 2
        shown = "".join(capfd.readouterr())
        assert f"/metrics/correct in {path} is damaged: its CRC-32 is" in shown


def test_a_lone_round_file_says_what_it_is_and_what_to_do(run, tmp_path, capfd):
    lone = Path(shutil.copy(run / "round_00003.h5", tmp_path))
    with h5py.File(lone) as file:
        assert set(np.unique(file["clients/critical/weight"][()])) == {-1}
    cure = "`pflmpi export RUN --round 3 --all -o one.h5`"
    for path, words in ((lone, ["inspect"]), (lone, ["inspect", "--digest"]), (lone.parent, ["inspect"])):
        assert main([words[0], str(path), *words[1:]]) == 2
        message = capfd.readouterr().err
        assert "is only the index of a checkpoint" in message and cure in message
    assert main(["export", str(lone), "--all", "-o", str(tmp_path / "one.h5")]) == 2
    assert cure in capfd.readouterr().err
    assert main(["inspect", str(run / "round_00003.h5")]) == 2
    assert f"name the folder of the run, {run}, with --round 3" in capfd.readouterr().err
    shard = next((run / "shards").iterdir())
    assert main(["inspect", str(shard)]) == 2
    assert "is a part of a run of rank" in capfd.readouterr().err


def test_an_older_round_is_taken_only_where_that_is_allowed(run, tmp_path, capfd):
    newest = run_folder.read_layout(run, 3)
    lost = next(name for name in newest.files if name not in run_folder.read_layout(run, 2).files)
    (run / lost).unlink()
    with h5py.File(run / "round_00003.h5") as file:
        intact = newest.file != newest.files.index(lost)
        assert np.array_equal((file["clients/critical/weight"][()] != -1).all((1, 2)), intact) and not intact.all()
    out = tmp_path / "out.h5"
    asking = [["export", "--all", "-o", str(out)], ["export", "--client", "1", "-o", str(tmp_path / "out.npz")]]
    for words in (*asking, ["inspect"], ["inspect", "--digest"]):
        assert main([words[0], str(run), *words[1:]]) == 2
        output = capfd.readouterr()
        assert f"round 3 of {run} cannot be used: {run / lost} is missing" in output.err and output.out == ""
        assert "or take round 2, the newest good one, with --allow-older or --round 2" in output.err
        assert not list(tmp_path.glob("out.*"))
    for words in (*asking, ["inspect"]):
        assert main([words[0], str(run), "--allow-older", *words[1:]]) == 0
        output = capfd.readouterr()
        assert "pflmpi: WARNING: round 3" in output.err and "round 2" in output.out
    with h5py.File(out) as file:
        assert about(file)["run"]["round"] == 2
    with pytest.warns(UserWarning, match="round 2 stands for a newer one"):
        assert open_run(run).round().number == 2


def test_a_full_disk_keeps_the_file_that_was_there(run, tmp_path, monkeypatch, capfd):
    out = tmp_path / "one.h5"
    out.write_bytes(b"precious")

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert main(["export", str(run), "--all", "--force", "-o", str(out)]) == 2
    assert "No space left on device; free space" in capfd.readouterr().err
    assert out.read_bytes() == b"precious" and sorted(path.name for path in tmp_path.iterdir()) == ["one.h5", "run"]
