"""The cells of a sweep as tasks of a job array, and runs that a launcher starts."""

import os
import signal
import sys
from pathlib import Path

import pytest

import processes
import quick_run
import table_file
from pflmpi.cli import main
from pflmpi.errors import ConfigError
from pflmpi.store import run_folder, verify
from pflmpi.sweep.lock import lock_cell, lock_sweep_folder
from pflmpi.sweep.pending import CellTask
from pflmpi.sweep.runs import run_cells
from pflmpi.sweep.table import Cell


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(lock, *words):
    """Check that a lock is held by another, with these words in the error."""
    with pytest.raises(ConfigError) as raised, lock:
        pass
    assert all(word in str(raised.value) for word in words), raised.value


def launcher(folder, text):
    """A program that stands in for srun."""
    path = folder / "start it"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return f"'{path}' -n 1"


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """What a launcher does, as a line of bash, whose ranks leave the first cell after so many rounds."""
    folder, cell = tmp_path_factory.mktemp("finished"), "sweeps/small/FedAvg/few/seed0"
    for rounds in (1, 2):
        raw = {**table_file.TABLE["base"], "algorithm": {"name": "fedavg"}, "training": {"rounds": rounds}, "seed": 0}
        quick_run.run(raw, folder / str(rounds))
    return {rounds: f"cp -r '{folder}/{rounds}/.' {cell}" for rounds in (1, 2)}


# --- locks --------------------------------------------------------------------------------------------------------


def test_tasks_share_a_folder_that_a_sweep_has_for_itself(tmp_path):
    with lock_sweep_folder(tmp_path, shared=True), lock_sweep_folder(tmp_path, shared=True):
        refused(lock_sweep_folder(tmp_path), "another sweep works in", "or a job array")
    with lock_sweep_folder(tmp_path):
        refused(lock_sweep_folder(tmp_path, shared=True), "another sweep works in")


def test_a_cell_has_one_task(tmp_path):
    with lock_cell(tmp_path / "a" / "seed0"), lock_cell(tmp_path / "a" / "seed1"):
        refused(lock_cell(tmp_path / "a" / "seed0"), "another task works on", "seed0")
    with lock_cell(tmp_path / "a" / "seed0"):
        pass


# --- the command --------------------------------------------------------------------------------------------------


def test_an_override_need_not_suit_cells_that_are_not_selected(tmp_path, capfd):
    rows = {"FedAvg": {"algorithm": {"name": "fedavg"}}, "FedProx": {"algorithm": {"name": "fedprox"}}}
    words = ["sweep", str(table_file.write(tmp_path, rows=rows)), "--dry-run", "-s", "algorithm.prox_weight=0.1"]
    assert main([*words, "--only", "FedProx/*"]) == 0
    assert "FedProx" in capfd.readouterr().out
    assert main(words) == 2, "FedAvg has no such key"
    assert "prox_weight" in capfd.readouterr().err


def test_a_cell_is_run_beside_other_tasks_and_is_skipped_when_it_is_done(tmp_path, capfd):
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}})
    out = Path("sweeps") / "small"
    with lock_sweep_folder(out, shared=True), lock_cell(out / "FedAvg" / "few" / "seed0"):
        assert main(["sweep", str(path), "--cell", "1", "--ranks", "1"]) == 0
        assert main(["sweep", str(path), "--cell", "0", "--ranks", "1"]) == 2
    shown = capfd.readouterr()
    assert "cell 1: Local/few/seed0: 0 of 2 rounds done" in shown.out and "1 runs: 1 done (0 of them" in shown.out
    assert "another task works on sweeps/small/FedAvg/few/seed0" in shown.err
    assert verify.find_newest_good(out / "Local" / "few" / "seed0") == (2, [])
    with lock_sweep_folder(out):  # a task that has nothing to do needs no lock
        assert main(["sweep", str(path), "--cell", "1"]) == 0
    assert capfd.readouterr().out == "cell 1: Local/few/seed0: 2 of 2 rounds done\n"


def test_cells_are_numbered_among_the_selected_ones(tmp_path, capfd):
    path = str(table_file.write(tmp_path))
    assert main(["sweep", path, "--only", "Local/*", "--seeds", "1", "--cell", "1", "--dry-run"]) == 0
    assert capfd.readouterr().out.splitlines()[0] == "Local/many (M)/seed0  0/2 rounds  start"


def test_a_launcher_starts_the_runs_and_says_how_many_ranks_they_have(finish, tmp_path, capfd):
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}})
    start = launcher(tmp_path, f'printf "%s " "$@" > words; {finish[2]}')
    assert main(["sweep", str(path), "--launcher", start, "--dry-run"]) == 0
    folder = "sweeps/small/FedAvg/few/seed0"
    assert f"{start} pflmpi run {folder}.yaml --out {folder} --continue --quiet" in capfd.readouterr().out.splitlines()
    assert main(["sweep", str(path), "--launcher", start, "--cell", "0"]) == 0
    words = Path("words").read_text().strip()
    assert words == f"-n 1 {sys.executable} -P -m pflmpi run {folder}.yaml --out {folder} --continue --quiet"
    assert verify.find_newest_good(Path(folder)) == (2, [])


def test_the_runs_of_a_launcher_may_have_another_interpreter_as_in_a_container(finish, tmp_path):
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}})
    start = launcher(tmp_path, f'shift 2; echo "$@" > words; {finish[2]}')
    assert main(["sweep", str(path), "--launcher", start, "--python", "python", "--cell", "0"]) == 0
    folder = "sweeps/small/FedAvg/few/seed0"
    assert Path("words").read_text() == f"python -P -m pflmpi run {folder}.yaml --out {folder} --continue --quiet\n"


@pytest.mark.parametrize(
    "ends, expected, told", [([75], 75, "0 failed, 1 stopped"), ([3], 1, "1 failed"), ([75, 3], 1, "1 failed, 1 stop")]
)
def test_a_stopped_run_is_not_a_failure_and_can_be_resumed(ends, expected, told, tmp_path, capfd):
    rows = {f"row{code}": {"algorithm": {"name": "local"}} for code in ends}
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}}, rows=rows)
    codes = "; ".join(f'[[ "$*" != */row{code}/* ]] || exit {code}' for code in ends)
    assert main(["sweep", str(path), "--launcher", launcher(tmp_path, codes)]) == expected
    assert told in capfd.readouterr().out


def test_a_launcher_that_ends_with_0_before_all_rounds_is_not_believed(finish, tmp_path, capfd):
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}})
    words = ["sweep", str(path), "--cell", "0", "--launcher"]
    assert main([*words, launcher(tmp_path, "exit 0")]) == 1
    shown = capfd.readouterr()
    assert "1 runs: 0 done (0 of them before), 1 failed" in shown.out
    assert "failed: ended with 0 and 0 of 2 rounds: the launcher has started no rank, or has lost it" in shown.err
    assert main([*words, launcher(tmp_path, finish[1])]) == 1
    assert "failed: ended with 0 and 1 of 2 rounds" in capfd.readouterr().err
    assert main([*words, launcher(tmp_path, f'shift 6; echo "$@" > words; {finish[2]}')]) == 0
    assert Path("words").read_text() == "resume sweeps/small/FedAvg/few/seed0 -s training.rounds=2 --quiet\n"


def test_a_run_that_stops_early_by_its_own_rule_is_done(tmp_path, capfd):
    stop = {"metric": "accuracy_mean", "patience": 1, "min_delta": 1.0}
    base = table_file.write(tmp_path, seeds=[0], columns={"few": {"training": {"rounds": 9, "stop": stop}}})
    assert main(["sweep", str(base), "--only", "Local/*", "--ranks", "1"]) == 0
    assert "1 runs: 1 done" in capfd.readouterr().out
    assert max(run_folder.rounds(Path("sweeps/small/Local/few/seed0"))) < 9


def test_a_cell_that_is_stopped_again_and_again_before_a_round_is_given_up(finish, tmp_path, capfd):
    """Its job, which is requeued after 75 and not after 3, would else start for ever."""
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}})
    words = ["sweep", str(path), "--cell", "0"]
    stops, works = launcher(tmp_path, "exit 75"), f"{finish[1]}; exit 75"
    assert [main([*words, "--launcher", stops]) for _ in range(4)] == [75] * 4
    assert main([*words, "--launcher", launcher(tmp_path, works)]) == 75, "a round was complete: it counts anew"
    stops = launcher(tmp_path, "exit 75")
    assert [main([*words, "--launcher", stops]) for _ in range(5)] == [75, 75, 75, 75, 3]
    assert "stopped 5 times in a row before a round was complete; give its job more --time" in capfd.readouterr().err
    assert main([*words, "--launcher", stops]) == 75, "submitted again, it is started as before"


# --- several cells in a task --------------------------------------------------------------------------------------


def pack(folder, codes):
    """Words that run the cells of a table, with a row for each exit code that a launcher gives them."""
    rows = {f"row{number}": {"algorithm": {"name": "local"}} for number in range(len(codes))}
    path = table_file.write(folder, seeds=[0], columns={"few": {}}, rows=rows)
    ends = "".join(
        f'[[ "$*" != */row{n}/* ]] || {{ echo {n} >> started; exit {code}; }}\n' for n, code in enumerate(codes)
    )
    return ["sweep", str(path), "--launcher", launcher(folder, ends), "--cell"]


def test_a_cell_that_fails_does_not_stop_those_after_it(tmp_path, capfd):
    path = table_file.write(tmp_path, seeds=[0])  # four cells
    words = ["sweep", str(path), "--ranks", "1", "--cell"]
    out = Path("sweeps/small")
    with lock_cell(out / "FedAvg" / "few" / "seed0"):
        assert main([*words, "0,2-3"]) == 2, "the worst"
    shown = capfd.readouterr()
    assert "another task works on sweeps/small/FedAvg/few/seed0" in shown.err
    assert [line.split(":")[0] for line in shown.out.splitlines() if line.startswith("cell")] == [
        "cell 0",
        "cell 2",
        "cell 3",
    ]
    assert [verify.find_newest_good(out / "Local" / column / "seed0")[0] for column in ("few", "many_M")] == [2, 2]
    assert main([*words, "0,2-3"]) == 0 and "cell 2: Local/few/seed0: 2 of 2 rounds done\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    "codes, expected, started", [((3, 3, 3), 1, "012"), ((3, 75, 3), 75, "01"), ((75, 3, 3), 75, "0")]
)
def test_a_task_that_is_stopped_begins_no_other_cell_and_is_requeued(codes, expected, started, tmp_path):
    assert main([*pack(tmp_path, codes), "0-2"]) == expected
    assert Path("started").read_text().split() == [*started]


def test_a_task_whose_cell_is_given_up_begins_no_other_cell(tmp_path, capfd):
    words = pack(tmp_path, (75, 3))
    assert [main([*words, "0-1"]) for _ in range(5)] == [75, 75, 75, 75, 3]
    assert "row0/few/seed0 was stopped 5 times in a row" in capfd.readouterr().err
    assert Path("started").read_text().split() == ["0"] * 5


def test_a_signal_while_the_last_run_ends_is_noted(tmp_path):
    task = CellTask(Cell("row", "column", 0, {}), "start", 0, 2, ("--version",))
    task.cell.log(tmp_path).parent.mkdir(parents=True)

    def record(_):
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    outcome = run_cells([task], tmp_path, lambda _: (), [processes.ENVIRONMENT], (), record)
    assert outcome.signal == signal.SIGINT and not outcome.failed
