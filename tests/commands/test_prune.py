"""`pflmpi prune`: checkpoints are deleted, and those that stay are whole."""

import os
import shutil

import pytest

import quick_run
from pflmpi.cli import main
from pflmpi.store import run_folder, run_lock, verify
from pflmpi.text import format_bytes

ROUNDS = 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    raw = quick_run.settings(training={"rounds": ROUNDS, "participation": 0.2}, checkpoint={"keep": 0})
    quick_run.run(raw, folder)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def sizes(run):
    return {path.relative_to(run): path.stat().st_size for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--every", "3", "--keep", "2"], [0, 3, 6, 7, 8]),
        (["--every", "5"], [0, 5, 8]),
        (["--keep", "3"], [6, 7, 8]),
        ([], [8]),
        (["--keep", "99"], [*range(9)]),
    ],
)
def test_what_stays_is_whole_and_what_is_freed_is_said(run, words, kept, capfd):
    before, digests = sizes(run), {round: run_folder.digest(run, round) for round in kept}
    assert main(["prune", str(run), *words, "--dry-run"]) == 0
    dry_run = capfd.readouterr().out
    assert sizes(run) == before
    assert main(["prune", str(run), *words]) == 0
    after = sizes(run)
    assert {path: after[path] for path in after} == {path: before[path] for path in after}, "others are not touched"
    freed = sum(before[path] for path in before.keys() - after.keys())
    count = len(before) - len(after)
    assert f": {count} file{'s' * (count != 1)}, {format_bytes(freed)} freed; checkpoints" in (
        out := capfd.readouterr().out
    )
    assert dry_run == out.replace(" freed;", " would be freed;")
    assert run_folder.rounds(run) == kept
    assert all(not verify.problems(run, round) and run_folder.digest(run, round) == digests[round] for round in kept)
    needed = {name for round in kept for name in run_folder.read_layout(run, round).files}
    assert {f"shards/{path.name}" for path in (run / "shards").iterdir()} == needed
    assert main(["inspect", str(run), "--verify"]) == 0
    assert main(["prune", str(run), *words]) == 0 and ": 0 files, 0 B freed" in capfd.readouterr().out


def test_it_goes_on_as_before(run, whole, tmp_path):
    longer = shutil.copytree(whole, tmp_path / "longer")
    assert main(["prune", str(run), "--every", "4"]) == 0
    digests = {quick_run.resume(folder, ("training.rounds=10",)) for folder in (run, longer)}
    assert len(digests) == 1


def test_a_running_run_a_damaged_one_and_wrong_numbers_are_refused(run, capfd):
    before = sizes(run)
    lock = run_lock.take(run, {}, False)
    assert main(["prune", str(run)]) == 2 and "is being written by" in capfd.readouterr().err
    lock.release()
    assert main(["prune", str(run), "--keep", "0"]) == 2 and "--keep 0: must be at least 1" in capfd.readouterr().err
    assert main(["prune", str(run / "shards")]) == 2
    newest = run / f"round_0000{ROUNDS}.h5"
    os.truncate(newest, newest.stat().st_size - 9)
    assert main(["prune", str(run)]) == 2
    assert f"round {ROUNDS}, which would stay, is damaged" in capfd.readouterr().err
    assert sizes(run).keys() == before.keys()


@pytest.mark.parametrize("shards", [True, False])
def test_a_run_without_a_checkpoint_is_refused_as_inspect_does(run, shards, capfd):
    for path in [*run.glob("round_*.h5"), *([] if shards else run.glob("shards/*"))]:
        path.unlink()
    before = sizes(run)
    refusals = []
    for words in (["prune", "--dry-run"], ["inspect"]):
        assert main([*words, str(run)]) == 2
        refusals.append(capfd.readouterr().err)
    assert f"{run} has no checkpoint" in refusals[0] and refusals[0] == refusals[1]
    assert main(["prune", str(run), "--keep", "2"]) == 2 and sizes(run) == before


def test_nothing_is_deleted_where_an_older_round_that_would_stay_is_damaged(run, capfd):
    before, shard = sizes(run), run / "shards/round_00006_rank_000.h5"
    assert f"shards/{shard.name}" not in run_folder.read_layout(run, ROUNDS).files
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert main(["prune", str(run), "--every", "6"]) == 2
    assert f"round 6, which would stay, is damaged: {shard}" in capfd.readouterr().err
    assert sizes(run) == before


def test_nothing_outside_of_the_run_is_deleted(run, tmp_path, capfd):
    outside = shutil.copytree(run / "shards", tmp_path / "outside")
    needed = run_folder.read_layout(run, ROUNDS).files
    name = next(name for path in sorted(outside.iterdir()) if (name := f"shards/{path.name}") not in needed)
    (run / name).unlink()
    (run / name).symlink_to(outside / (run / name).name)
    before = sizes(outside)
    assert main(["prune", str(run)]) == 0 and not os.path.lexists(run / name), "a link is deleted, not what it names"
    shutil.rmtree(run / "shards")
    (run / "shards").symlink_to(outside)
    for words in ([], ["--dry-run"]):
        assert main(["prune", str(run), *words]) == 2 and "is a link" in capfd.readouterr().err
    assert sizes(outside) == before


class Killed(BaseException):
    pass


def test_killed_at_any_file_the_rounds_that_are_there_are_whole(run, tmp_path, monkeypatch):
    unlink = os.unlink
    for at in (0, 3, 6):
        folder, left = shutil.copytree(run, tmp_path / str(at)), iter(range(at, -1, -1))

        def dying(self, missing_ok=False, left=left):
            if "round_" in self.name and next(left) == 0:
                raise Killed
            if not missing_ok or self.exists():
                unlink(self)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(type(run), "unlink", dying)
            main(["prune", str(folder), "--every", "4"])
        for round in run_folder.rounds(folder):
            assert verify.problems(folder, round) == []
        assert main(["prune", str(folder), "--every", "4"]) == 0
        assert run_folder.rounds(folder) == [0, 4, 8]
