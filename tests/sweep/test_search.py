"""A fair search: as many trials for every row, no round twice, the best on fresh seeds."""

import argparse
import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

import quick_run
import table_file
from pflmpi.analysis.metrics import compute_margin_of_error
from pflmpi.analysis.table import Entry, Value
from pflmpi.cli import main
from pflmpi.commands.search import _compare_rows, _complete, _is_left, _score, paired_test
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.store import metrics_file, run_folder
from pflmpi.sweep import search
from pflmpi.sweep.table import SweepTable, list_cells, load, load_cells

BASE = {
    **table_file.TABLE["base"],
    "data": {"name": "digits", "limit": 200, "validation": 0.2},
    "training": {"rounds": 3, "lr": 0.1},
}
ROWS = {"FedAvg": {"algorithm": {"name": "fedavg"}}, "FedProx": {"algorithm": {"name": "fedprox"}}}


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(folder, **changes):
    return table_file.write(folder, **{"base": BASE, "columns": {"few": {}}, "rows": ROWS, **changes})


def drawn(path, budget, seed=2):
    return search.draw_trials(load(path), load_cells(path, [], 1, []), budget, seed)


def lines(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_every_row_has_as_many_trials_the_first_with_its_own_settings(tmp_path):
    path = write(tmp_path)
    by_cell = drawn(path, 5)
    assert {key: len(trials) for key, trials in by_cell.items()} == {("FedAvg", "few"): 5, ("FedProx", "few"): 5}
    for (row, _), trials in by_cell.items():
        assert trials[0].values == {} and trials[0].raw["training"]["lr"] == 0.1
        expected = {"training.lr"} | ({"algorithm.prox_weight"} if row == "FedProx" else set())
        for trial in trials[1:]:
            assert set(trial.values) == expected and trial.raw["seed"] == 2
            assert 0.001 <= trial.values["training.lr"] == trial.raw["training"]["lr"] <= 1
    assert len({trial.values["training.lr"] for trial in by_cell["FedProx", "few"][1:]}) == 4


def test_what_is_drawn_follows_from_the_seed_and_not_from_the_budget(tmp_path):
    path = write(tmp_path)
    few, many, other_seed = drawn(path, 3), drawn(path, 9), drawn(path, 3, seed=5)
    for key in few:
        assert [trial.values for trial in many[key][:3]] == [trial.values for trial in few[key]]
        assert other_seed[key][1].values != few[key][1].values


def test_a_table_overrides_ranges_by_row(tmp_path):
    ranges = {
        "*": {"training.lr": None, "training.batch_size": [8, 16]},
        "FedProx": {"algorithm.prox_weight": {"low": 2, "high": 4}},
    }
    by_cell = drawn(write(tmp_path, search=ranges), 20)
    sizes = {trial.values["training.batch_size"] for trial in by_cell["FedAvg", "few"][1:]}
    assert sizes == {8, 16} and not any("training.lr" in trial.values for trial in by_cell["FedAvg", "few"])
    weights = [trial.values["algorithm.prox_weight"] for trial in by_cell["FedProx", "few"][1:]]
    assert {*weights} == {2, 3, 4} and all(isinstance(weight, int) for weight in weights)


def test_what_an_override_sets_is_not_drawn(tmp_path):
    path, overrides = write(tmp_path), ["training.lr=0.05", "algorithm={name: fedprox}"]
    by_cell = search.draw_trials(load(path), load_cells(path, overrides, 1, []), 3, 2, overrides)
    for of_cell in by_cell.values():
        assert [trial.raw["training"]["lr"] for trial in of_cell] == [0.05] * 3
        assert all(set(trial.values) == {"algorithm.prox_weight"} for trial in of_cell[1:])


def test_what_has_no_effect_in_a_row_is_not_drawn_and_refused_where_the_table_says_so(tmp_path):
    rows = {name: {"algorithm": {"name": "fedgmh", "variant": name}} for name in ("full", "oneavg")}
    by_cell = drawn(write(tmp_path, rows=rows), 2)
    assert "algorithm.critical_share" in by_cell["full", "few"][1].values
    assert set(by_cell["oneavg", "few"][1].values) == {"training.lr", "algorithm.head_lr"}
    ranges = {"oneavg": {"algorithm.critical_share": [0.1, 0.2]}}
    trial = drawn(path := write(tmp_path, rows=rows, search=ranges), 2)["oneavg", "few"][1]
    search.write_table(search.build_step_table(load(path), [trial], 0, 1, 2), tmp_path / "step1.yaml")
    with pytest.raises(ConfigError, match=r"algorithm.critical_share = 0\.. has an effect with algorithm.variant"):
        load_cells(tmp_path / "step1.yaml", [], None, [])


@pytest.mark.parametrize(
    "ranges, expected",
    [
        ({"Ditto": {"training.lr": [1]}}, "search: 'Ditto' matches none of the rows FedAvg, FedProx"),
        ({"*": {"training.lr": {"low": 1, "high": 0.1}}}, "low must be below high"),
        ({"*": {"training.lr": {"low": 0, "high": 1, "log": True}}}, "with log above 0"),
        ({"*": {"training.lr": []}}, "at least 1 item"),
        ({"*": {"seed": [1]}}, "'seed' is no section.key"),
        ({"*": {"trainin.lr": [1]}}, "unknown section 'trainin'"),
    ],
)
def test_ranges_that_cannot_be_are_refused(ranges, expected, tmp_path):
    with pytest.raises(ConfigError, match=expected):
        load(write(tmp_path, search=ranges))


def test_a_cosine_over_all_rounds_is_said_in_numbers_so_that_a_trial_can_go_on(tmp_path):
    path = write(tmp_path, base={**BASE, "training": {"rounds": 9, "schedule": "cosine"}})
    assert all(trial.raw["training"]["decay_rounds"] == 9 for trials in drawn(path, 2).values() for trial in trials)
    path = write(tmp_path, base={**BASE, "training": {"rounds": 9, "schedule": "cosine", "warmup": 2}})
    assert all(trial.raw["training"]["decay_rounds"] == 7 for trials in drawn(path, 2).values() for trial in trials)


def test_the_tuned_table_has_the_settings_of_each_cell_and_the_seeds_of_the_table(tmp_path):
    path = write(tmp_path, rows={"Fed[1]": ROWS["FedAvg"], "Fed*": ROWS["FedProx"]})
    by_cell = drawn(path, 3)
    tuned = search.build_tuned_table(load(path), [by_cell["Fed[1]", "few"][1], by_cell["Fed*", "few"][2]], 3)
    search.write_table(tuned, tmp_path / "tuned.yaml")
    assert isinstance(load(tmp_path / "tuned.yaml"), SweepTable)
    rates = {}
    for cell, config in load_cells(tmp_path / "tuned.yaml", [], None, []):
        rates.setdefault(cell.row, set()).add((config.training.lr, cell.seed in (0, 1)))
    assert rates == {
        "Fed[1]": {(by_cell["Fed[1]", "few"][1].values["training.lr"], True)},
        "Fed*": {(by_cell["Fed*", "few"][2].values["training.lr"], True)},
    }


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_search_goes_on_from_its_checkpoints_and_tests_the_best_on_fresh_seeds(tmp_path, capfd):
    # With the largest rate values overflow: that trial has diverged, and counts as the worst.
    path = write(
        tmp_path, search={"*": {"training.lr": [0.001, 0.3, 1e20]}, "FedProx": {"algorithm.prox_weight": None}}
    )
    words = ["search", str(path), "--budget", "4", "--rungs", "2", "--ranks", "1", "--jobs", "2"]
    assert main(words) == 0
    out = Path("searches/small")
    shown = capfd.readouterr().out
    assert "step 1 of 2: 8 trials" in shown and "step 2 of 2: 4 trials" in shown
    tried = lines(out / "tried.csv")
    assert [(line["row"], line["trial"]) for line in tried] == [(row, str(n)) for row in ROWS for n in range(4)]
    for row in ROWS:
        of_row = [line for line in tried if line["row"] == row]
        assert sorted(int(line["rounds"]) for line in of_row) == [1, 1, 3, 3]
        assert all(line["validation"] == "diverged" for line in of_row if "1e+20" in line["settings"])
    for line in tried:  # seed 2: none of the table's
        folder = out / "trials" / f"{line['row']}_few_{line['trial']}" / "trial" / "seed2"
        if line["validation"] != "diverged":
            rounds, columns = int(line["rounds"]), metrics_file.read(folder)
            assert run_folder.rounds(folder)[-1] == len(columns) == rounds
            best = max(float(round_line["validation_accuracy_mean"]) for round_line in columns)
            assert float(line["validation"]) == pytest.approx(100 * best, abs=1e-3)
            first = folder / "round_00001.h5"  # of a survivor, from before the second step
            assert first.stat().st_mtime <= (out / "step2.yaml").stat().st_mtime
    for cell, config in load_cells(out / "tuned.yaml", [], None, []):
        full_length = [line for line in tried if line["row"] == cell.row and line["rounds"] == "3"]
        scores = [-1.0 if line["validation"] == "diverged" else float(line["validation"]) for line in full_length]
        rates = {
            json.loads(line["settings"]).get("training.lr", 0.1)
            for line, score in zip(full_length, scores, strict=True)
            if score == max(scores)
        }
        assert config.training.lr in rates and cell.seed in (0, 1) and config.training.rounds == 3
    compared = lines(out / "compared.csv")
    assert [line["seeds"] for line in compared] == ["2", "2"] and {line["p"] == "" for line in compared} == {
        True,
        False,
    }
    times = {file: file.stat().st_mtime_ns for file in out.glob("t*/**/*.h5")}
    assert main(words) == 0  # nothing is left to compute
    assert {file: file.stat().st_mtime_ns for file in out.glob("t*/**/*.h5")} == times
    assert lines(out / "compared.csv") == compared
    more = ["search", str(path), "--budget", "5", *words[4:]]
    assert main(more) == 0  # those that had gone on stay as they are, and are compared by the same rounds
    assert {file: file.stat().st_mtime_ns for file in times if "trials" in str(file)}.items() <= times.items()
    assert [line["trial"] for line in lines(out / "tried.csv")] == [*"01234", *"01234"]
    capfd.readouterr()
    path = write(tmp_path, base={**BASE, "training": {"rounds": 3, "lr": 0.2}})
    assert main(words) == 2 and "was made with another configuration" in capfd.readouterr().err


def made(cell, out, rounds, **training):
    """A finished run of a cell, after other rounds or with other options of training."""
    raw = {**cell.raw, "training": {**cell.raw["training"], "rounds": rounds, **training}}
    quick_run.run(raw, cell.run(out))
    cell.config(out).write_text(yaml.safe_dump(raw))


def test_tests_of_the_best_trials_with_other_rounds_or_settings_run_anew(tmp_path, capfd):
    """A search with fewer rounds finds tests of one with more; trials may be ahead, and these not."""
    path, out = write(tmp_path, seeds=[0, 1], rows={"Local": {"algorithm": {"name": "local"}}}), tmp_path / "tuned"
    for cell, rounds, lr in zip(cells := list_cells(load(path), [], None), (4, 3), (0.1, 0.2), strict=True):
        made(cell, out, rounds, lr=lr)
    assert [_is_left(cell, out, tuned=True) for cell in cells] == [True, True]
    assert not _is_left(cells[0], out), "a trial"
    options = argparse.Namespace(submit=None, ranks=1, jobs=1, debug=False)
    assert _complete(options, path, out, cells) == 0
    assert [run_folder.rounds(cell.run(out))[-1] for cell in cells] == [3, 3]
    assert len([*(out / "Local" / "few").glob("old-seed*")]) == 2
    assert not any(_is_left(cell, out, tuned=True) for cell in cells)


@pytest.mark.parametrize("every, tested", [(3, False), (1, True)])
def test_a_trial_that_is_ahead_counts_if_it_was_tested_in_the_last_round_of_its_step(every, tested, tmp_path):
    rows = {"Local": {"algorithm": {"name": "local"}}}
    base, out = {**BASE, "training": {"rounds": 2, "lr": 0.1}, "evaluation": {"every": every}}, tmp_path / "trials"
    table = load(path := write(tmp_path, base=base, seeds=[2], rows=rows))
    (cell,) = list_cells(table, [], None)
    made(cell, out, 3)
    assert _is_left(cell, out) is not tested
    options = argparse.Namespace(submit=None, ranks=1, jobs=1, debug=False)
    assert _complete(options, path, out, [cell], trials=True) == 0
    assert run_folder.rounds(cell.run(out))[-1] == (3 if tested else 2)
    assert np.isfinite(_score(table, out, cell)).all()


def test_a_trial_that_is_ahead_and_has_lost_its_metrics_is_named(tmp_path):
    rows = {"Local": {"algorithm": {"name": "local"}}}
    base, out = {**BASE, "training": {"rounds": 2, "lr": 0.1}}, tmp_path / "trials"
    table = load(write(tmp_path, base=base, seeds=[2], rows=rows))
    (cell,) = list_cells(table, [], None)
    made(cell, out, 3)
    metrics_file.path(cell.run(out)).unlink()
    assert not _is_left(cell, out), "its last round has a checkpoint"
    with pytest.raises(CheckpointError, match=r"metrics.csv is missing"):
        _score(table, out, cell)


def test_a_run_in_the_folder_of_a_trial_counts_only_with_the_settings_of_that_trial(tmp_path):
    path, out = write(tmp_path, seeds=[2], rows={"Local": {"algorithm": {"name": "local"}}}), tmp_path / "trials"
    (cell,) = list_cells(load(path), [], None)
    made(cell, out, 3, lr=0.2)
    with pytest.raises(ConfigError, match=r"training.lr = 0.2 in .*seed2.yaml, 0.1 in the trial; move it away"):
        _is_left(cell, out)
    assert _is_left(cell, out, tuned=True)
    cell.config(out).unlink()
    with pytest.raises(ConfigError, match=r"seed2.yaml is missing; put it back from a copy"):
        _is_left(cell, out)


def test_a_trial_whose_newest_checkpoint_is_damaged_runs_its_unvouched_rounds_again(tmp_path):
    path, out = write(tmp_path, seeds=[2], rows={"Local": {"algorithm": {"name": "local"}}}), tmp_path / "trials"
    (cell,) = list_cells(load(path), [], None)
    made(cell, out, 3)
    before = [line["validation_accuracy_mean"] for line in metrics_file.read(cell.run(out))]
    os.truncate(cell.run(out) / "round_00003.h5", 1000)
    head, end, last = (file := cell.run(out) / "metrics.csv").read_text().rstrip().rpartition("\n")
    file.write_text(head + end + last.replace(before[2], "0.9999") + "\n")
    options = argparse.Namespace(submit=None, ranks=1, jobs=1, debug=False)
    assert _is_left(cell, out) and _complete(options, path, out, [cell], trials=True) == 0
    assert [line["validation_accuracy_mean"] for line in metrics_file.read(cell.run(out))] == before


def entry(row, values, seeds=2):
    mean = Value(np.mean(values))
    return Entry(row, "few", mean, mean, None, None, len(values), seeds, 0, 0, "", values=values)


def test_rows_are_compared_by_the_values_that_their_table_shows(tmp_path):
    table = load(write(tmp_path, metric="mean"))
    lines = _compare_rows(table, [entry("FedAvg", [90.0, 91.0]), entry("FedProx", [99.0])])
    assert [(line["mean"], line["best"]) for line in lines] == [("90.50", "FedAvg"), ("nan", "FedAvg")]


def test_rows_of_infinite_values_are_compared_too(tmp_path):
    table = load(write(tmp_path, metric="mean"))
    lines = _compare_rows(table, [entry("FedAvg", [90.0, 91.0]), entry("FedProx", [-math.inf, -math.inf])])
    assert [(line["mean"], line["std"], line["best"]) for line in lines] == [
        ("90.50", "0.71", "FedAvg"),
        ("-inf", "nan", "FedAvg"),
    ]


def test_the_lowest_deviation_over_clients_is_the_best(tmp_path):
    table = load(write(tmp_path, metric="spread"))
    lines = _compare_rows(table, [entry("FedAvg", [2.0, 3.0]), entry("FedProx", [5.0, 6.0])])
    assert {line["best"] for line in lines} == {"FedAvg"} and [line["p"] == "" for line in lines] == [True, False]


def test_a_trial_that_has_diverged_runs_again_with_other_settings_and_else_is_done(tmp_path):
    out, options = tmp_path / "trials", argparse.Namespace(submit=None, ranks=1, jobs=1, debug=False)
    for lr, rounds in ((0.1, 1), (0.2, 3)):
        base = {**BASE, "training": {"rounds": 3, "lr": lr}}
        path = write(tmp_path, base=base, seeds=[2], rows={"Local": {"algorithm": {"name": "local"}}})
        (cell,) = list_cells(load(path), [], None)
        if lr == 0.1:
            made(cell, out, 1)
            cell.log(out).write_text("pflmpi: round 2: client 0 diverged (values in its state x are not finite)\n")
        assert _complete(options, path, out, [cell], trials=True) == 0
        assert run_folder.rounds(cell.run(out))[-1] == rounds


def test_cells_whose_trials_would_share_a_folder_are_refused(tmp_path):
    rows = {"A": ROWS["FedAvg"], "A, b": ROWS["FedProx"]}
    for columns in ({"b, c": {}, "c": {}}, {"b c": {}, "C": {}}):
        with pytest.raises(ConfigError, match=r"'A, b,? c' and 'A, b, [cC]' would share folders; rename a row or c"):
            drawn(write(tmp_path, rows=rows, columns=columns), 2)


def test_a_search_without_validation_samples_is_refused(tmp_path, capfd):
    assert main(["search", str(write(tmp_path, base=table_file.TABLE["base"])), "--budget", "3"]) == 2
    assert "FedAvg/few has no validation samples; set data.validation" in capfd.readouterr().err


@pytest.mark.parametrize("marked", [False, True])
def test_samples_that_the_data_marks_are_validation_samples_which_is_known_before_the_first_trial(
    marked, tmp_path, monkeypatch, capfd
):
    data = np.random.default_rng(0)
    arrays = {"x": data.random((60, 4)), "y": np.arange(60) % 2, "client": np.arange(60) // 20}
    np.savez(tmp_path / "my.npz", **arrays, **({"validation": np.arange(60) % 5 == 0} if marked else {}))
    monkeypatch.setattr("pflmpi.commands.search._complete", lambda *_, **__: 75)
    base = {**BASE, "data": {"path": "my.npz"}, "partition": {"name": "writers"}}
    assert main(["search", str(write(tmp_path, base=base)), "--budget", "3"]) == (75 if marked else 2)
    assert ("FedAvg/few has no validation samples" in capfd.readouterr().err) is not marked


@pytest.mark.slow
def test_a_best_trial_of_a_larger_budget_is_tested_in_the_place_of_the_one_before(tmp_path, monkeypatch, capfd):
    drawn = iter([1e-6, 0.3])
    monkeypatch.setattr("pflmpi.sweep.search._draw", lambda *_: next(drawn))
    sections = {"rows": {"Local": {"algorithm": {"name": "local"}}}, "search": {"*": {"training.lr": [1e-6, 0.3]}}}
    path = write(tmp_path, base={**BASE, "training": {"rounds": 2, "lr": 1e-5}}, **sections)
    words = ["search", str(path), "--rungs", "1", "--ranks", "1", "--budget"]
    assert main([*words, "2"]) == 0
    drawn = iter([1e-6, 0.3])
    before = lines(Path("searches/small/compared.csv"))
    assert main([*words, "3"]) == 0
    assert "was made with another configuration" not in capfd.readouterr().err
    assert float(lines(Path("searches/small/compared.csv"))[0]["mean"]) > float(before[0]["mean"])
    assert len(list(Path("searches/small/tuned/Local/few").glob("old-seed*"))) == 2  # they are kept


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--budget", "0"], "--budget 0: must be at least 1"),
        (["--budget", "3", "--rungs", "0"], "--rungs 0: must be at least 1"),
        (["--budget", "3", "--submit=--time=30", "--jobs", "4"], "give --submit='--jobs=... --ntasks=...'"),
        (["--budget", "3", "--submit=--time=30", "--ranks", "2"], "give --submit='--jobs=... --ntasks=...'"),
        (["--budget", "3", "--seed", "1"], "--seed 1: the search needs one of its own, not of the table"),
    ],
)
def test_options_that_cannot_be_are_refused(words, expected, tmp_path, capfd):
    assert main(["search", str(write(tmp_path)), *words]) == 2
    assert expected in capfd.readouterr().err


def test_the_interval_is_that_of_scipy_and_rows_that_differ_alike_have_a_p():
    values = np.array([90.0, 91.5, 89.0, 92.0])
    low, high = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    assert compute_margin_of_error(values.tolist()) == pytest.approx((high - low) / 2, rel=1e-12)
    assert paired_test([1.0, 2.0], [1.0, 2.0]) == 1 and paired_test([1.0, 2.0], [0.0, 1.0]) == 0
    assert paired_test([95.1, 95.2, 95.3], [95.0, 95.1, 95.2]) < 1e-9, "up to rounding"
    assert paired_test([0.3, 0.4], [0.1, 0.2]) < 1e-9, "of which scipy warns"


def test_submit_makes_a_job_array_of_the_next_step(tmp_path, capfd, monkeypatch):
    seen = []
    monkeypatch.setattr("pflmpi.commands.submit.run", lambda options: seen.append(options) or 0)
    words = ["search", str(write(tmp_path)), "--budget", "3", "--submit=--time=30 --ntasks=2 -- --exclusive"]
    assert main(words) == 75
    (options,) = seen
    assert (options.array, options.out) == (Path("searches/small/step1.yaml"), Path("searches/small/trials"))
    assert (options.time, options.ntasks, options.sbatch) == ("30", "2", ["--exclusive"])
    assert len(yaml.safe_load(options.array.read_text())["rows"]) == 6
    assert "the same command goes on once this job has ended" in capfd.readouterr().out
