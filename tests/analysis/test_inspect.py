"""`pflmpi inspect --diff` and `--verify`: what changed, and whether every file is as it was written."""

import shutil

import numpy as np
import pytest

import quick_run
from pflmpi.analysis import difference as differences
from pflmpi.analysis import integrity
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.store import checked_hdf5, module_file, run_folder, shard


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    quick_run.run(quick_run.settings(training={"rounds": 4}, checkpoint={"keep": 0}), folder, ranks=2)
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def changes(run, before, after):
    opened = open_run(run)
    return {change.path: change for change in differences.compute_changes(opened.round(before), opened.round(after))}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([3.0, 4.0], [3.0, 3.0], 0.2),
        ([[0.0, 2.0]], [[0.0, 2.0]], 0.0),
        ([0.0], [0.0], 0.0),
        ([0.0], [0.5], float("inf")),
        ([True, False], [False, True], 2**0.5),
        ([200], [255], 55 / 200),
    ],
)
def test_the_relative_change_by_hand(before, after, expected):
    kind = np.uint8 if before == [200] else None  # a difference of bytes must not wrap around
    assert differences.relative_change(np.array(before, kind), np.array(after, kind)) == pytest.approx(expected, abs=0)


def test_every_leaf_has_its_change_over_the_clients(finished):
    changed = changes(finished, 1, 3)
    states = [run_folder.read_clients(finished, number, np.arange(7))["cohort0"][1] for number in (1, 3)]
    servers = [run_folder.read_server(finished, number) for number in (1, 3)]
    assert set(changed) == {f"clients/{leaf}" for leaf in states[0]} | {f"server/{leaf}" for leaf in servers[0]}
    for leaf in states[0]:
        change, (one, two) = changed[f"clients/{leaf}"], (state[leaf] for state in states)
        apart = np.array([differences.relative_change(a, b) for a, b in zip(one, two, strict=True)])
        moved = [client for client in range(7) if one[client].tobytes() != two[client].tobytes()]
        assert change.clients == 7 and change.changed == len(moved) and 0 < len(moved) < 7
        assert change.mean == apart.mean() and change.largest == apart.max()
        shapes = (change.shape_before, change.shape_after)
        assert change.largest_client == int(apart.argmax()) and shapes == (one.shape, two.shape)
    for leaf in servers[0]:
        assert changed[f"server/{leaf}"].mean == differences.relative_change(servers[0][leaf], servers[1][leaf]) > 0


def test_a_round_does_not_differ_from_itself(finished):
    assert all(change.changed == 0 and change.largest == 0 for change in changes(finished, 2, 2).values())


def test_clients_that_were_not_written_are_not_read(copy):
    expected = changes(copy, 3, 4)
    participants = run_folder.read_metrics(copy, 4)["participants"]
    layout = run_folder.read_layout(copy, 3)
    needed = {layout.files[layout.file[client]] for client in participants}
    unneeded = set(layout.files) - needed
    assert unneeded
    for name in unneeded:
        (copy / name).unlink()
    assert changes(copy, 3, 4) == expected


def test_few_rows_at_a_time_give_the_same(finished, monkeypatch):
    expected = changes(finished, 1, 4)
    monkeypatch.setattr(differences, "_BYTES_AT_ONCE", 1)
    assert changes(finished, 1, 4) == expected


def test_diff_prints_a_line_for_each_array(finished, capfd):
    assert main(["inspect", str(finished), "--diff", "3", "4"]) == 0
    shown = capfd.readouterr()
    lines = [line for line in shown.out.splitlines() if "clients/model/head/weight" in line]
    change = changes(finished, 3, 4)["clients/model/head/weight"]
    assert (
        f"{change.changed} of 7 clients" in lines[0]
        and f"{change.largest:.3g} (client {change.largest_client})" in lines[0]
    )
    assert "[7, 10, 12]" in lines[0] and shown.err == ""


def test_diff_says_of_what_did_not_change_that_it_did_not(finished, capfd):
    assert main(["inspect", str(finished), "--diff", "4", "4"]) == 0
    shown = capfd.readouterr().out
    arrays = len(changes(finished, 4, 4))
    assert shown.count("unchanged") == arrays and f"changed: 0 of {arrays} arrays" in shown


def flip(path, position=-9):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def verify(run, capfd):
    """Return the exit code, the problems, and the last line that was printed."""
    code = main(["inspect", str(run), "--verify"])
    shown = capfd.readouterr()
    problems = [line.removeprefix("damaged: ") for line in shown.out.splitlines() if line.startswith("damaged: ")]
    return code, problems, (shown.err or shown.out).splitlines()[-1]


def test_a_good_run_is_good_and_all_of_it_was_read(finished, capfd):
    code, problems, last = verify(finished, capfd)
    files = [*finished.rglob("*.h5"), *(path for name in ("config.yaml", "*.csv") for path in finished.rglob(name))]
    assert (code, problems) == (0, [])
    assert last.startswith(f"good: {len(files)} files, ") and last.endswith("checkpoints 0-4")
    checked = list(integrity.check(finished))
    assert sum(checked_file.bytes for checked_file in checked) == sum(path.stat().st_size for path in files)


def test_every_problem_is_named_once(copy, capfd):
    flip(copy / "round_00001.h5")
    (shard,) = (copy / "shards").glob("round_00000_rank_*.h5")  # which all ranks share
    flip(shard)
    (copy / "metrics.csv").write_text("round,seconds\n1,soon\n")
    code, problems, last = verify(copy, capfd)
    assert code == 2 and len(problems) == 3
    for name, problem in zip(("metrics.csv", shard.name, "round_00001.h5"), problems, strict=True):
        assert name in problem
    assert last.startswith("pflmpi: ")


def test_a_damaged_file_is_told_with_the_round_that_is_good(copy, capfd):
    flip(copy / "round_00004.h5", 40)
    code, problems, last = verify(copy, capfd)
    assert code == 2 and len(problems) == 1 and "round 3 is the newest good checkpoint" in last


def test_a_missing_shard_is_told_by_each_round_that_needs_it(copy, capfd):
    name = run_folder.read_layout(copy, 4).files[-1]
    needing = [number for number in run_folder.rounds(copy) if name in run_folder.read_layout(copy, number).files]
    (copy / name).unlink()
    code, problems, _ = verify(copy, capfd)
    assert code == 2
    assert problems == [f"{copy}/round_{n:05d}.h5: {copy / name} is missing" for n in needing]


def test_a_shard_with_other_clients_is_told(copy, capfd):
    name = run_folder.read_layout(copy, 4).files[-1]
    with checked_hdf5.reading(copy / name) as file:
        ids = checked_hdf5.read_dataset(file, "cohort0/client")
        rows = {
            leaf: checked_hdf5.read_dataset(file["cohort0/rows"], leaf)
            for leaf in checked_hdf5.names(file["cohort0/rows"])
        }
    shard.write_shard(copy / name, {"cohort0": (ids + 1, rows)})
    code, problems, _ = verify(copy, capfd)
    assert code == 2 and "is not the file that the checkpoint was made of" in problems[-1]


def test_the_constants_of_modules_are_checked_too(copy, capfd):
    module_file.write(copy, {0: module_file.Entries({"scale": module_file.CONSTANT}, {"scale": np.ones(9)})})
    assert verify(copy, capfd)[0] == 0
    flip(copy / "modules.h5")
    code, problems, _ = verify(copy, capfd)
    assert code == 2 and "modules.h5 is damaged" in problems[0]


def test_a_leftover_shard_is_checked_too(copy, capfd):
    (copy / "shards/round_00009_rank_000.h5").write_bytes(b"torn")
    code, problems, _ = verify(copy, capfd)
    assert code == 2 and "round_00009_rank_000.h5 is damaged" in problems[0]


def test_what_a_run_still_going_on_deletes_meanwhile_is_no_problem(copy):
    checking = integrity.check(copy)
    next(checking)  # the metrics
    (copy / "round_00001.h5").unlink()
    assert not [problem for checked_file in checking for problem in checked_file.problems]


def test_a_run_without_checkpoints_has_nothing_to_verify(copy, capfd):
    for path in copy.glob("*.h5"):
        path.unlink()
    assert verify(copy, capfd)[0] == 2
