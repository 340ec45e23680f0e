"""`sweep --budget`: the cheapest runs first, a stop in time, and what fitted and what is left."""

import time
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import table_file
from pflmpi.cli import main
from pflmpi.config.load import parse
from pflmpi.errors import ConfigError, Stopped
from pflmpi.forecast import budget as module
from pflmpi.forecast.budget import Budget, RunCost, but_seed, run_costs
from pflmpi.forecast.cache import Cache
from pflmpi.forecast.forecast import share_of_this_machine
from pflmpi.store.metrics import metrics_file
from pflmpi.sweep.cells import Cell, cells
from pflmpi.sweep.pending import CellTask
from pflmpi.sweep.table import load


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative folders are those of the test, and nothing was measured on this machine before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def task(row: str, seed: int = 0, done: int = 0, rounds: int = 100) -> CellTask:
    state = "done" if done == rounds else "continue" if done else "start"
    return CellTask(
        Cell(row, "c", seed, {"seed": seed, "algorithm": {"name": row}}),
        state,
        done,
        rounds,
        () if state == "done" else ("run",),
    )


COSTS = {but_seed(task("dear")): RunCost(2.0, 10.0), but_seed(task("cheap", seed=9)): RunCost(2.0, 1.0)}


def test_runs_that_need_least_come_first_and_unknown_ones_last() -> None:
    budget = Budget(1.0, 1, COSTS)
    tasks = [task("unknown"), task("dear"), task("cheap"), task("dear", seed=1, done=95), task("cheap", seed=2)]
    names = [one.cell.name for one in budget.cheapest_first(tasks)]
    assert names == ["dear/c/seed1", "cheap/c/seed0", "cheap/c/seed2", "dear/c/seed0", "unknown/c/seed0"]
    assert [budget.seconds(one) for one in tasks] == [inf, 1002, 102, 52, 102]
    assert budget.seconds(task("dear", done=100)) == 0


@pytest.mark.parametrize("jobs, seconds, fitting", [(1, 1105, 2), (1, 1103, 1), (2, 552, 2), (1, 1e9, 2)])
def test_as_many_fit_as_the_time_that_is_left_has_room_for(jobs: int, seconds: float, fitting: int) -> None:
    tasks = [task("dear"), task("unknown"), task("cheap"), task("cheap", done=100)]
    hours = 1104 / jobs / 3600
    expected = f"budget 2 h: {fitting} of 3 runs should fit; they need about {hours:.2f} h, and 1 run of unknown length"
    assert Budget(2.0, jobs, COSTS).expected(tasks, seconds) == expected


def test_one_seed_is_predicted_for_all_and_what_cannot_be_predicted_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def predict(config: Any, resources: Any, cache: Any) -> Any:
        asked.append(config.algorithm.name if hasattr(config.algorithm, "name") else type(config.algorithm).__name__)
        if asked[-1] == "FedAvg":
            raise ConfigError("no data")
        return SimpleNamespace(seconds=SimpleNamespace(round=3.0), start_up=lambda imports: imports + 1)

    monkeypatch.setattr(module, "predict", predict)
    table = load(table_file.write(tmp_path, columns={"few": {}}))
    tasks = [(CellTask(cell, "start", 0, 2, ("run",)), parse(cell.raw)) for cell in cells(table, (), None)]
    costs = run_costs(tasks, lambda _: share_of_this_machine(1, 0, 1), 2.0, Cache(tmp_path), lambda done, total: None)
    assert sorted(asked) == ["FedAvg", "Local"]
    (local,) = {but_seed(task) for task, _ in tasks if task.cell.name.startswith("Local")}
    assert costs == {local: RunCost(3.0, 3.0)}


def test_a_dry_run_shows_the_order_and_what_should_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = [{"row": "FedAvg", "set": {"training": {"rounds": 100_000}}}]
    path = table_file.write(tmp_path, seeds=[0], columns={"few": {}}, exceptions=longer)
    assert main(["sweep", str(path), "--ranks", "1", "--budget", "0.01", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "predicting how long the runs take" in shown.err  # also where there is no bar: it takes minutes
    first, *lines = shown.out.splitlines()
    assert first.startswith("budget 0.01 h: 1 of 2 runs should fit; they need about ")
    assert [line.split()[0] for line in lines[:2]] == ["Local/few/seed0", "FedAvg/few/seed0"]
    assert not Path("sweeps").exists()


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--budget", "0"], "--budget 0: must be hours, more than 0"),
        (["--budget", "-1"], "--budget -1: must be hours, more than 0"),
        (["--budget", "nan"], "--budget nan: must be hours, more than 0"),
        (["--budget", "inf"], "--budget inf: must be hours, more than 0"),
        (["--budget", "2", "--cell", "0"], "--budget 2 with --cell, which is one run; leave one of the two out"),
    ],
)
def test_a_budget_that_is_none_is_refused(
    words: list[str], expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(table_file.write(tmp_path)), *words]) == 2
    assert expected in capfd.readouterr().err


@pytest.mark.slow
def test_a_sweep_stops_in_time_and_goes_on_next_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
