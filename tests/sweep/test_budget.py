"""`sweep --budget`: the cheapest runs first, a stop in time, and what fitted and what is left."""

import logging
import time
from math import inf
from pathlib import Path

import pytest

import table_file
from pflmpi.cli import main
from pflmpi.config.load import parse
from pflmpi.errors import Stopped
from pflmpi.experiment.build import prepare
from pflmpi.forecast.budget import Budget, config_without_seed, seconds_per_round, work_per_round
from pflmpi.store import metrics_file
from pflmpi.sweep.pending import CellTask
from pflmpi.sweep.table import Cell, list_cells, load


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Relative folders are those of the test."""
    monkeypatch.chdir(tmp_path)


def task(row, seed=0, done=0, rounds=100):
    state = "done" if done == rounds else "continue" if done else "start"
    return CellTask(
        Cell(row, "c", seed, {"seed": seed, "algorithm": {"name": row}}),
        state,
        done,
        rounds,
        () if state == "done" else ("run",),
    )


WORK = {
    config_without_seed(task("dear")): 10.0,
    config_without_seed(task("cheap", seed=9)): 1.0,
    config_without_seed(task("large")): 1000.0,
}
SECONDS = {
    config_without_seed(task("dear")): 10.0,
    config_without_seed(task("cheap")): 2.0,
}  # 1 and 2 for a unit of work


def test_a_run_costs_what_its_like_has_taken_else_what_its_work_takes():
    tasks = [task("unknown"), task("dear"), task("cheap"), task("dear", seed=1, done=95), task("large")]
    budget = Budget(1.0, 1, tasks, WORK, SECONDS)
    names = [cell_task.cell.name for cell_task in budget.cheapest_first()]
    assert names == ["dear/c/seed1", "cheap/c/seed0", "dear/c/seed0", "large/c/seed0", "unknown/c/seed0"]
    assert [budget.seconds(cell_task) for cell_task in tasks] == [inf, 1000, 200, 50, 1.5 * 1000 * 100]
    assert budget.seconds(task("dear", done=100)) == 0


def test_before_any_cell_has_run_work_decides_and_no_seconds_are_said():
    tasks = [task("unknown"), task("large"), task("dear"), task("cheap")]
    budget = Budget(2.0, 1, tasks, WORK, {})
    assert [cell_task.cell.row for cell_task in budget.cheapest_first()] == ["cheap", "dear", "large", "unknown"]
    assert budget.expected(7200) == "budget 2 h: no cell has run yet, so that it is not known how many of 4 runs fit"


@pytest.mark.parametrize("jobs, seconds, fitting", [(1, 1201, 2), (1, 1199, 1), (2, 601, 2), (1, 1e9, 2)])
def test_as_many_fit_as_the_time_that_is_left_has_room_for(jobs, seconds, fitting):
    tasks = [task("dear"), task("unknown"), task("cheap"), task("cheap", done=100)]
    hours = 1200 / jobs / 3600
    expected = f"budget 2 h: {fitting} of 3 runs should fit; they need about {hours:.2f} h, and 1 run of unknown length"
    assert Budget(2.0, jobs, tasks, WORK, SECONDS).expected(seconds) == expected


def test_work_is_steps_times_parameters_and_what_cannot_be_read_is_left_out(tmp_path, monkeypatch, caplog):
    def warning(*arguments):
        logging.getLogger("pflmpi").warning("some clients train nothing")
        return prepare(*arguments)

    monkeypatch.setattr("pflmpi.forecast.budget.prepare", warning)
    seven = {"row": "Local", "set": {"training": {"steps": 7, "participation": 1.0}}}
    too_many = {"row": "FedAvg", "set": {"partition": {"name": "iid", "clients": 5000}}}
    table = load(table_file.write(tmp_path, columns={"few": {}}, exceptions=[seven, too_many]))
    tasks = [(CellTask(cell, "start", 0, 2, ("run",)), parse(cell.raw)) for cell in list_cells(table, (), None)]
    counts: list[tuple[int, int]] = []
    work = work_per_round(tasks, lambda done, total: counts.append((done, total)))
    assert counts == [(0, 2), (1, 2)], "one seed stands for the others"
    (local,) = {config_without_seed(task) for task, _ in tasks if task.cell.name.startswith("Local")}
    assert work == {local: 3 * 7 * (64 * 4 + 4 + 4 * 10 + 10)}, "clients, steps, parameters"
    assert not caplog.records, "each run warns of what it does"


def test_cells_that_have_run_say_how_long_a_round_takes(tmp_path):
    """The first round warms up; lines after the last checkpoint, and those without figures, are not counted."""
    first, second = task("dear", seed=1, done=4), task("dear", seed=2, done=4)
    for cell_task, seconds in ((first, (9, 1, 2, 3, 70)), (second, (9, "", 4, 5))):
        folder = cell_task.cell.run(tmp_path)
        folder.mkdir(parents=True)
        lines = [f"{number},{value}" for number, value in enumerate(seconds, 1)]
        (folder / "metrics.csv").write_text("\n".join(["round,seconds", *lines]) + "\n")
    assert seconds_per_round([first, second, task("cheap", done=1)], tmp_path) == {config_without_seed(first): 3.0}


def test_a_dry_run_shows_the_order_and_what_should_fit(tmp_path, capsys):
    longer = [{"row": "FedAvg", "set": {"training": {"rounds": 100_000}}}]
    path = table_file.write(tmp_path, seeds=[0, 1], columns={"few": {}}, exceptions=longer)
    words = ["sweep", str(path), "--ranks", "1"]

    def shown():
        capsys.readouterr()
        assert main([*words, "--budget", "0.01", "--dry-run"]) == 0
        return capsys.readouterr().out.splitlines()

    first, *lines = shown()
    assert first == "budget 0.01 h: no cell has run yet, so that it is not known how many of 4 runs fit"
    names = [f"{row}/few/seed{seed}" for row in ("Local", "FedAvg") for seed in (0, 1)]
    assert [line.split()[0] for line in lines[:4]] == names
    assert not Path("sweeps").exists()
    assert main([*words, "--only", "Local/*", "--seeds", "1"]) == 0
    assert shown()[0].startswith("budget 0.01 h: 1 of 3 runs should fit; they need about ")


@pytest.mark.slow
def test_a_sweep_stops_in_time_and_goes_on_next_time(tmp_path, capfd):
    longer = [{"row": "FedAvg", "set": {"training": {"rounds": 100_000}}}]
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}}, exceptions=longer)
    words, long = ["sweep", str(path), "--ranks", "1", "--budget", "0.01"], Path("sweeps/small/FedAvg/few/seed0")
    for start in (0, 1):
        before, began = len(metrics_file.read(long)), time.monotonic()
        assert main(words) == Stopped.exit_code
        assert time.monotonic() - began < 40  # of 36, with time to end on a loaded machine
        shown = capfd.readouterr().out
        assert f"2 runs: 1 done ({start} of them before), 0 failed, 1 left, about " in shown
        assert " h; the same command goes on" in shown
        assert len(metrics_file.read(long)) > before
