"""What a report says of runs: cost to an accuracy, gain over training alone, further measures."""

from pathlib import Path

import numpy as np
import pytest
import yaml

import quick_run
from pflmpi.analysis.comparable import group_by_seed
from pflmpi.analysis.metrics import CostTo
from pflmpi.analysis.plots import Missing
from pflmpi.analysis.report import build_runs_table
from pflmpi.analysis.run import open_run
from pflmpi.analysis.runs import open_runs
from pflmpi.analysis.selection import name_runs
from pflmpi.analysis.series import accuracy, cost
from pflmpi.analysis.series.clients import describe_gains
from pflmpi.analysis.summary import average_seeds, by_title, choose_targets, format_line, summarize_run, summarize_runs
from pflmpi.analysis.table import compute_entries
from pflmpi.analysis.table_text import format_entries_csv, format_markdown
from pflmpi.commands.progress import show_summary
from pflmpi.errors import ConfigError
from pflmpi.experiment.stored_config import stored_config
from pflmpi.store import config_file, metrics_file
from pflmpi.sweep.table import SweepTable, list_cells

ACCURACY = ("0.5", "", "0.8", "0.7", "0.9")


def written(folder, accuracy, algorithm="fedavg", sent=10, lost=0):
    """A run without checkpoints: 2 seconds, and so many bytes in each direction, in each round.

    Args:
        lost: rounds before a new metrics.csv began.
    """
    folder.mkdir(parents=True)
    config = {"algorithm": {"name": algorithm}, "training": {"rounds": 5}, "recorded": {"data": "d", "partition": "p"}}
    config_file.write(folder, yaml.safe_dump(config))
    metrics_file.restart(folder, lost)
    for round, value in enumerate(accuracy[lost:], lost + 1):
        line = dict.fromkeys(metrics_file.COLUMNS, "")
        line |= {name: "0" for name in metrics_file.COLUMNS if metrics_file.is_count(name)}
        line |= {"round": str(round), "accuracy_mean": value, "seconds": "2", "test_loss": str(3 - round / 2)}
        line |= {"up_bytes": str(sent), "down_bytes": str(3 * sent)}
        metrics_file.append(folder, list(line.values()))
    return open_run(folder)


def test_the_cost_until_a_target_is_that_of_the_rounds_to_the_first_that_reaches_it(tmp_path):
    run = written(tmp_path / "run", ACCURACY)
    assert run.cost_to(0.8) == CostTo(rounds=3, seconds=6.0, up_bytes=30, down_bytes=90)
    assert run.cost_to(0.5) == CostTo(1, 2.0, 10, 30)
    assert run.cost_to(0.91) is None
    assert run.cost_to(2.0, "test_loss") == CostTo(2, 4.0, 20, 60), "of losses at most"
    with pytest.raises(ConfigError, match="'accuracy_maen'; did you mean 'accuracy_mean'"):
        run.cost_to(0.8, "accuracy_maen")


def test_of_a_run_whose_first_metrics_are_lost_totals_and_costs_are_unknown(tmp_path):
    run, complete = written(tmp_path / "lost", ACCURACY, lost=2), written(tmp_path / "whole", ACCURACY)
    assert run.verified_metrics.notes[0] == "metrics of round 1-2 are lost: totals, and costs to a target, are unknown"
    for name in ("participants", "up_bytes", "wire_down_bytes", "seconds"):
        np.testing.assert_array_equal(run.columns[name], [np.nan, np.nan, *complete.columns[name][2:]])
    assert run.cost_to(0.8) is None and run.cost_to(0.91) is None
    lines = summarize_runs(runs := name_runs([run, complete]), [0.8])
    unknown = [name for name, text in format_line(lines[0]).items() if not text and format_line(lines[1])[name]]
    totals = [name for name in by_title(lines[0]) if "(bytes)" in name or name.startswith("time") or "to 80 %" in name]
    assert unknown == totals, "and nothing else"
    for figure in (cost.plot_against_bytes(runs), cost.plot_against_seconds(runs)):
        assert [curve.source for curve in figure.curves] == ["fedavg whole"]
        assert "Not drawn, as metrics of rounds are lost: fedavg lost." in figure.caption
    assert isinstance(cost.plot_against_bytes(runs[:1]), Missing) and isinstance(
        cost.plot_against_seconds(runs[:1]), Missing
    )
    np.testing.assert_array_equal(cost.plot_bytes(run.columns, "").curves[0].y, [np.nan, np.nan, 10, 10, 10])
    nothing = written(tmp_path / "nothing", ACCURACY, lost=5).columns
    assert "its metrics are lost" in cost.plot_bytes(nothing, "nothing").why


def test_a_run_that_went_on_without_its_metrics_says_so_at_its_end(tmp_path, capfd):
    quick_run.run(quick_run.settings(training={"rounds": 1}), tmp_path / "run")
    metrics_file.path(tmp_path / "run").unlink()
    quick_run.resume(tmp_path / "run", ("training.rounds=2",))
    run = open_run(tmp_path / "run")
    assert run.notes == ["metrics of round 1 are lost: totals, and costs to a target, are unknown"]
    show_summary(run.path, stored_config(run.path, ()))
    text = capfd.readouterr().out
    assert "as metrics.csv was lost" in text and not any(unit in text for unit in ("KiB", "MiB"))


def test_metrics_that_are_deleted_while_the_run_writes_them_are_lost_up_to_there(tmp_path, monkeypatch):
    append = metrics_file.append

    def then_delete(run, line, *more):
        checksum = append(run, line, *more)
        if line[0] == 1:
            metrics_file.path(run).unlink()
        return checksum

    monkeypatch.setattr(metrics_file, "append", then_delete)
    quick_run.run(quick_run.settings(), tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.notes == ["metrics of round 1 are lost: totals, and costs to a target, are unknown"]
    assert np.isnan(run.columns["up_bytes"]).tolist() == [True, False, False]


def test_by_default_costs_are_counted_to_what_all_reach_and_to_nine_tenths_of_the_best(tmp_path):
    runs = [written(tmp_path / "a", ACCURACY), written(tmp_path / "b", ("0.4", "0.756"))]
    assert choose_targets(runs) == [0.75, 0.81], "0.9 of 0.9"
    assert choose_targets([written(tmp_path / "c", ())]) == []
    for percent in (29, 57, 58):
        run = written(tmp_path / str(percent), (f"0.{percent}",))
        assert choose_targets([run])[0] == percent / 100 == run.columns["accuracy_mean"][0]


def test_the_table_has_the_options_that_have_unlike_values(tmp_path):
    runs = [written(tmp_path / name, ACCURACY) for name in "abc"]
    for run, algorithm in zip(runs, ({"mu": 0.1, "k": 1}, {"mu": 0.5, "k": 1}, {"beta": 2}), strict=True):
        run.config.update(algorithm={"name": "x", **algorithm}, seed=0, training={"rounds": 5, "lr": 0.1})
    lines = [by_title(line) for line in summarize_runs(name_runs(runs))]
    assert [line["mu"] for line in lines] == ["0.1", "0.5", ""]
    assert not {"k", "beta", "training.lr", "seed"} & set(lines[0]), "the same, or of one run alone"


def test_an_option_with_the_name_of_a_column_keeps_its_section(tmp_path):
    runs = [written(tmp_path / name, ACCURACY) for name in "ab"]
    names = "rounds", "of", "seed", "seeds", "run", "folder"
    for value, run in enumerate(runs):
        run.config.update(algorithm={"name": "x", "mu": value, **dict.fromkeys(names, value)}, seed=7 + value)
    lines = [by_title(line) for line in summarize_runs(name_runs(runs))]
    assert [line[f"algorithm.{name}"] for name in names for line in lines] == ["0", "1"] * len(names)
    assert [(line["mu"], line["seed"], line["rounds"]) for line in lines] == [("0", "7", 5), ("1", "8", 5)]


def test_the_table_of_the_page_has_one_unit_for_all_runs_and_the_folder_last(tmp_path):
    runs = [written(tmp_path / "a", ACCURACY, sent=1 << 20), written(tmp_path / "b", ("0.1",), sent=1 << 10)]
    shown = build_runs_table(summarize_runs(name_runs(runs), [0.8]))
    rows = [dict(zip(shown.columns, row, strict=True)) for row in shown.rows]
    assert [row["up (MiB)"] for row in rows] == ["5.00", "0.00"] and shown.columns[-1] == "folder"
    assert [row["sent to 80 % (MiB)"] for row in rows] == ["12.00", ""], "three rounds, up and down"
    assert "last (%)" in shown.columns and "macro F1 (%)" not in shown.columns, "which no run has"


@pytest.mark.parametrize(
    "folders, shown",
    [
        (["FedGMH/MNIST/seed0", "FedPer/MNIST/seed0"], ["FedGMH/MNIST/seed0", "FedPer/MNIST/seed0"]),
        (["x/seed0", "x/seed1"], ["seed0", "seed1"]),
        (["a", "a/b"], ["a", "a/b"]),
    ],
)
def test_the_folders_of_several_runs_are_told_apart(folders, shown, tmp_path):
    runs = [written(tmp_path / "sweeps" / name, ACCURACY) for name in folders]
    rows = build_runs_table(summarize_runs(name_runs(runs))).rows
    assert [row[-1] for row in rows] == shown
    assert build_runs_table(summarize_runs(name_runs(runs[:1]))).rows[0][-1] == str(runs[0].path)


def test_the_gain_is_over_the_same_clients_of_a_run_of_local_training(tmp_path):
    runs = name_runs([written(tmp_path / "a", ACCURACY), written(tmp_path / "b", ("0.6",), "local", sent=0)])
    for named_run, accuracies in zip(runs, ([0.9, 0.5, np.nan], [0.6, 0.7, np.nan]), strict=True):
        vars(named_run.run)["final"] = lambda _, values=accuracies: np.array(values)
    lines = summarize_runs(runs, [0.8])
    ours = by_title(lines[0])
    assert (ours["gain over local"], ours["clients below local"]) == (pytest.approx(5.0), 1)
    assert (ours["rounds to 80 %"], ours["time to 80 % (s)"], ours["bytes to 80 %"]) == (3, 6.0, 120)
    texts = format_line(lines[1])
    assert not any(texts[name] for name in ("gain over local", "rounds to 80 %", "time to 80 % (s)"))
    (alone,) = map(by_title, summarize_runs(runs[:1]))
    assert "gain over local" not in alone and "unseen (%)" not in alone


def seeded(tmp_path, lasts, **algorithm):
    """Runs of seeds 0, 1, ... whose last accuracy is known."""
    runs = []
    for seed, value in enumerate(lasts):
        run = written(tmp_path / str(seed), ("0.1", str(value)))
        run.config.update(seed=seed, algorithm={"name": "fedavg", **algorithm})
        runs.append(run)
    return runs


def test_runs_that_differ_in_the_seed_alone_are_one_line_with_mean_deviation_and_number(tmp_path):
    runs = name_runs([*seeded(tmp_path / "a", (0.5, 0.7)), *seeded(tmp_path / "b", (0.9,), mu=1)])
    lines = average_seeds(runs, summarize_runs(runs, [0.6]))
    several, alone = map(by_title, lines)
    assert (several["seeds"], several["last (%)"], several["rounds"]) == (2, pytest.approx(60), 2)
    assert several["last (%) ±"] == pytest.approx(200**0.5), "the standard deviation of two"
    assert several["rounds to 60 %"] == "", "which one of them has not reached"
    assert several["seed"] == "0, 1" and several["folder"] == str(tmp_path / "a")
    assert (alone["seeds"], alone["last (%)"]) == (1, 90) and np.isnan(float(alone["last (%) ±"]))
    shown = build_runs_table(lines)
    rows = [dict(zip(shown.columns, row, strict=True)) for row in shown.rows]
    assert [row["last (%)"] for row in rows] == ["60.00 ± 14.14", "90.00"]
    assert [row["run"] for row in rows] == ["fedavg a", "fedavg b/0"]


def test_seeds_with_infinities_of_both_signs_have_no_mean(tmp_path):
    runs = name_runs(seeded(tmp_path, (np.inf, -np.inf)))
    (line,) = map(by_title, average_seeds(runs, summarize_runs(runs)))
    assert np.isnan([line["last (%)"], line["last (%) ±"]]).all()


def test_folders_are_shown_from_where_they_part_also_where_runs_were_named_by_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = name_runs([*seeded(Path("a"), (0.5, 0.7)), *seeded(Path("b"), (0.9,), mu=1)])
    shown = build_runs_table(average_seeds(runs, summarize_runs(runs)))
    assert [row[-1] for row in shown.rows] == ["a", "b/0"]


def test_the_same_seed_twice_is_no_second_seed(tmp_path):
    runs = name_runs([written(tmp_path / name, ACCURACY) for name in "ab"])
    assert [len(group.runs) for group in group_by_seed(runs)] == [1, 1]
    lines = summarize_runs(runs)
    assert average_seeds(runs, lines) == lines


def test_eight_columns_are_shown_and_the_best_values_marked(tmp_path):
    runs = name_runs([written(tmp_path / "a", ACCURACY), written(tmp_path / "b", ("0.4", "0.756"))])
    for place, (named_run, values) in enumerate(zip(runs, ({"mu": 1, "k": 1}, {"mu": 2}), strict=True)):
        named_run.run.config.update(algorithm={"name": "x", **values}, training={"rounds": 5, "lr": place})
    shown = build_runs_table(summarize_runs(runs, [0.75, 0.8]))
    default = [name for place, name in enumerate(shown.columns) if place not in shown.optional]
    assert len(default) <= 8 < len(shown.columns) and default[0] == "run" and {"mu", "last (%)"} <= {*default}
    marked = {(row, shown.columns[column]) for row, column in shown.marked}
    assert {(0, "best (%)"), (0, "last (%)"), (1, "rounds to 75 %")} <= marked
    assert not {name for _, name in marked} & {"rounds", "up (B)", "time (s)"}, "where neither is better"


def test_the_gain_is_explained_by_the_runs_it_is_over(tmp_path):
    runs = name_runs([written(tmp_path / "a", ACCURACY), written(tmp_path / "b", ("0.6",), "local", sent=0)])
    assert describe_gains(runs) == "", "no accuracies of clients"
    for named_run in runs:
        vars(named_run.run)["final"] = lambda _: np.array([0.5])
    ends = "above that of the same client, mean over clients, in local (1 round) for fedavg."
    assert describe_gains(runs).endswith(ends)


def test_further_measures_are_drawn_where_they_are(tmp_path):
    quick_run.run(quick_run.settings(evaluation={"when": "both"}), tmp_path / "run")
    run = open_run(tmp_path / "run")
    names = [figure.name for figure in accuracy.plot_further_measures(name_runs([run]))]
    columns = ("accuracy_bottom", "f1_macro", "trained_accuracy_mean", "train_loss", "test_loss")
    assert names == [f"{column}_over_rounds" for column in columns]
    (line,) = map(by_title, summarize_runs(name_runs([run])))
    assert line["macro F1 (%)"] == 100 * run.columns["f1_macro"][-1]
    assert line["lowest 10 % (%)"] == 100 * run.columns["accuracy_bottom"][-1]
    assert line["after training (%)"] == 100 * run.columns["trained_accuracy_mean"][-1]


def test_values_at_the_end_are_of_one_round_the_last_with_an_evaluation(tmp_path):
    run = written(tmp_path / "run", ("0.5", "0.7", ""))
    columns = {"trained_accuracy_mean": [0.6, np.nan, np.nan], "train_loss": [3.0, 2.0, 1.0]}
    run.columns.update({name: np.array(values) for name, values in columns.items()})
    line = by_title(summarize_run(run))
    assert (line["last (%)"], line["training loss"], line["test loss"]) == (70, 2.0, 2.0)
    assert np.isnan(line["after training (%)"]), "no participant of round 2 has a value"


def test_a_frame_has_a_line_for_each_run(tmp_path):
    for name in ("a", "b"):
        written(tmp_path / name, ACCURACY if name == "a" else ("0.1",))
    frame = open_runs(f"{tmp_path}/*").summary(0.8, 0.9)
    assert frame["rounds to 80 %"].tolist()[0] == 3 and frame["rounds to 80 %"].isna().tolist() == [False, True]
    assert frame["bytes to 90 %"].tolist()[0] == 200


def test_a_frame_has_one_line_for_runs_that_differ_in_the_seed_alone(tmp_path):
    for seed, last in enumerate(("0.5", "0.7")):
        run = written(tmp_path / str(seed), (last,))
        config_file.write(run.path, yaml.safe_dump({**run.config, "seed": seed}))
    frame = open_runs(f"{tmp_path}/*").summary()
    assert (frame["seeds"].tolist(), frame["last (%)"].tolist()) == ([2], [pytest.approx(60)])
    assert frame["last (%) ±"].tolist() == [pytest.approx(200**0.5)]


def test_a_table_with_a_target_says_what_it_took(tmp_path):
    table = SweepTable(
        title="t", source="s", seeds=[0, 1], target=0.8, metric="f1", columns={"few": {}}, rows={"FedAvg": {}}
    )
    listed = list_cells(table, (), None)
    for cell, accuracies in zip(listed, (ACCURACY, ("0.1",) * 5), strict=True):
        config = written(cell.run(tmp_path), accuracies).config
        config_file.write(cell.run(tmp_path), yaml.safe_dump(config | {"seed": cell.seed}))
        cell.raw["training"] = {"rounds": 5}
        cell.config(tmp_path).write_text(yaml.safe_dump(cell.raw))
    entries = compute_entries(table, listed, tmp_path)
    assert [(cost.rounds, cost.up_bytes) for cost in entries[0].costs] == [(3, 30)]
    text = format_markdown(table, entries, [])
    assert "rounds to an accuracy of 80 %, of the seeds that reach it:" in text and "| FedAvg | 3.00 |" in text
    header, line = format_entries_csv(table, entries).splitlines()
    assert dict(zip(header.split(","), line.split(","), strict=True))["seeds_at_target"] == "1"
