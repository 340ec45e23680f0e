"""The numbers behind the figures of a report, compared with what was written by hand or by small runs."""

import numpy as np
import pytest
import yaml

import quick_run
from pflmpi.analysis import summary
from pflmpi.analysis.plots import Curves, Matrices, Missing, Stack
from pflmpi.analysis.run import open_run
from pflmpi.analysis.selection import name_runs, pick_evenly_spaced
from pflmpi.analysis.series import accuracy, clients, cost, partition
from pflmpi.config import load as configuration
from pflmpi.experiment.build import load_federation
from pflmpi.store import config_file, metrics_file


def written(folder, lines, algorithm="fedavg"):
    """A run without checkpoints: its metrics have these values, and zeros elsewhere."""
    folder.mkdir(parents=True)
    config = {"algorithm": {"name": algorithm}, "training": {"rounds": 20}, "recorded": {"data": "d", "partition": "p"}}
    config_file.write(folder, yaml.safe_dump(config))
    metrics_file.restart(folder, 0)
    for number, line in enumerate(lines, 1):
        values = dict.fromkeys(metrics_file.COLUMNS, "0") | {"round": str(number)}
        metrics_file.append(folder, [str(value) for value in (values | line).values()])
    return open_run(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """FedAvg and local training with the same clients, and local training with others; the last two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    runs = {}
    for name, algorithm, seed in (("fedavg", "fedavg", 3), ("local", "local", 3), ("other", "local", 4)):
        quick_run.run(
            quick_run.settings(algorithm={"name": algorithm}, checkpoint={"keep": 2}, seed=seed), folder / name
        )
        runs[name] = open_run(folder / name)
    return runs


def curves(plot):
    assert isinstance(plot, Curves), plot
    return plot


# --- accuracy -----------------------------------------------------------------------------------------------------


def test_accuracy_is_shown_for_evaluated_rounds_with_the_best_marked(tmp_path):
    lines = [
        {"accuracy_mean": 0.5, "accuracy_std": 0.1},
        {"accuracy_mean": "", "accuracy_std": ""},
        {"accuracy_mean": 0.75, "accuracy_std": 0.25},
        {"accuracy_mean": 0.625, "accuracy_std": 0.125},
    ]
    plot = curves(accuracy.plot_main_measure(name_runs([written(tmp_path / "run", lines)])))
    mean, below, above = plot.curves
    assert mean.x.tolist() == [1, 3, 4] and mean.y.tolist() == [50.0, 75.0, 62.5] and mean.mark == 1
    assert below.y.tolist() == [40.0, 50.0, 50.0] and above.y.tolist() == [60.0, 100.0, 75.0]
    table = plot.table().splitlines()
    assert table[0] == 'curve,point,round,"accuracy, mean over clients (%)",low,high,marked'
    assert table[2] == "fedavg,,3,75,,,1"


def test_accuracy_over_bytes_and_seconds_counts_the_rounds_without_evaluation_too(tmp_path):
    lines = [
        {"accuracy_mean": 0.5, "up_bytes": 1024, "down_bytes": 512, "seconds": 2},
        {"accuracy_mean": "", "up_bytes": 1024, "down_bytes": 512, "seconds": 3},
        {"accuracy_mean": 0.75, "up_bytes": 1024, "down_bytes": 512, "seconds": 4},
    ]
    runs = name_runs([written(tmp_path / "a", lines), written(tmp_path / "b", [{"accuracy_mean": 0.25}], "local")])
    sent = curves(cost.plot_against_bytes(runs))
    assert sent.x_label.endswith("(KiB)") and "nothing is sent: local" in sent.caption
    assert [curve.x.tolist() for curve in sent.curves] == [[1.5, 4.5]]
    time = curves(cost.plot_against_seconds(runs[:1]))
    assert time.curves[0].x.tolist() == [2.0, 9.0] and time.curves[0].y.tolist() == [50.0, 75.0]


def test_the_band_is_there_only_in_rounds_with_a_checkpoint(trained):
    run = trained["fedavg"]
    mean = curves(accuracy.plot_main_measure(name_runs([run]))).curves[0]
    assert mean.low is not None and mean.high is not None and mean.x.tolist() == [1, 2, 3]
    assert np.isnan(mean.low).tolist() == [True, False, False]
    for place, number in ((1, 2), (2, 3)):
        accuracies = np.sort(100 * run.round(number).metrics["accuracy"])  # 7 clients: quantile 0.1 is at place 0.6
        assert mean.low[place] == pytest.approx(accuracies[0] + 0.6 * (accuracies[1] - accuracies[0]))
        assert mean.high[place] == pytest.approx(accuracies[5] + 0.4 * (accuracies[6] - accuracies[5]))


def test_losses_are_shown_for_the_rounds_that_have_them(tmp_path):
    lines = [
        {"train_loss": 2.0, "test_loss": ""},
        {"train_loss": 1.0, "test_loss": 1.5},
    ]
    train, test = accuracy.plot_further_measures(name_runs([written(tmp_path / "run", lines)]))[-2:]
    assert curves(train).curves[0].y.tolist() == [2.0, 1.0] and curves(test).curves[0].x.tolist() == [2]
    old = [{"train_loss": "", "test_loss": ""}]
    names = [plot.name for plot in accuracy.plot_further_measures(name_runs([written(tmp_path / "old", old)]))]
    assert names and not [name for name in names if "loss" in name]


def test_a_run_that_has_not_been_evaluated_is_told_of(tmp_path):
    plot = accuracy.plot_main_measure(name_runs([written(tmp_path / "run", [])]))
    assert isinstance(plot, Missing) and "no round has been evaluated" in plot.why


# --- names --------------------------------------------------------------------------------------------------------


def test_runs_of_one_algorithm_are_told_apart_by_their_folders(tmp_path):
    paths = ["x/seed0", "x/seed1", "y/seed0"]
    runs = [written(tmp_path / path, [], name) for path, name in zip(paths, ("ditto", "ditto", "local"), strict=True)]
    assert [named.label for named in name_runs(runs)] == ["ditto x/seed0", "ditto x/seed1", "local"]
    assert [named.style for named in name_runs(runs)] == [0, 1, 2]


def test_many_runs_share_the_legend_of_their_algorithm(tmp_path):
    runs = [written(tmp_path / str(i), [], "ditto" if i % 2 else "local") for i in range(13)]
    among = name_runs(runs)
    assert len({named.label for named in among}) == 13
    assert {(named.legend, named.style) for named in among} == {("local", 0), ("ditto", 1)}


def test_rounds_are_spread_evenly_with_both_ends():
    assert pick_evenly_spaced(list(range(1, 301)), 4) == [1, 101, 200, 300]
    assert pick_evenly_spaced([5, 9], 4) == [5, 9]


# --- rounds -------------------------------------------------------------------------------------------------------


def test_bytes_per_round_are_those_of_the_metrics(tmp_path):
    line = {"up_bytes": 2048, "down_bytes": 1024, "wire_up_bytes": 3072, "wire_down_bytes": 512}
    plot = curves(cost.plot_bytes(written(tmp_path / "run", [line]).columns, "a"))
    assert {curve.label: curve.y.tolist() for curve in plot.curves} == {
        "up": [2.0],
        "down": [1.0],
        "up, wire": [3.0],
        "down, wire": [0.5],
    }


def test_the_parts_of_a_round_add_up_to_it_and_a_long_first_round_is_cut_off(tmp_path):
    parts = {"exchange_seconds": 0.25, "evaluation_seconds": 0.25, "checkpoint_seconds": 0.125}
    usual = parts | {"seconds": 1}
    run = written(tmp_path / "run", [usual | {"seconds": 20}, *[usual] * 19])
    plot = cost.plot_seconds(run.columns)
    assert isinstance(plot, Stack)
    assert np.sum(list(plot.parts.values()), axis=0).tolist() == [20.0] + [1.0] * 19
    assert plot.parts["communication"].tolist() == plot.parts["evaluation"].tolist() == [0.25] * 20
    assert plot.parts["checkpoint"].tolist() == [0.125] * 20
    assert plot.top == pytest.approx(1.5) and "round 1 (20.0 s)" in plot.caption


def test_the_balance_of_ranks_is_shown_where_there_are_several(tmp_path):
    alone = written(tmp_path / "alone", [{"seconds": 1, "compute_seconds": 0.5, "waiting_seconds": 0}] * 2)
    assert cost.plot_imbalance(alone.columns) == []
    times = [(0.5, 0.25), (1.0, 0.5)]
    lines = [{"compute_seconds": slow, "waiting_seconds": wait} for slow, wait in times]
    (plot,) = cost.plot_imbalance(written(tmp_path / "several", lines).columns)
    assert [curve.y.tolist() for curve in plot.curves] == [[0.5, 1.0], [0.25, 0.5]]
    assert "2.00 times the mean" in plot.caption


def test_rounds_whose_figures_were_lost_have_no_part_in_the_balance_of_ranks(tmp_path):
    lines = [{"compute_seconds": "", "waiting_seconds": ""}, {"compute_seconds": 1.0, "waiting_seconds": 0.5}]
    (plot,) = cost.plot_imbalance(written(tmp_path / "run", lines).columns)
    assert "2.00 times the mean" in plot.caption


def test_rounds_without_the_time_of_checkpoints_are_drawn_without_it(tmp_path):
    line = {"seconds": 1, "exchange_seconds": 0.25, "evaluation_seconds": 0.25}
    run = written(tmp_path / "run", [line | {"checkpoint_seconds": ""}, line | {"checkpoint_seconds": 0.5}])
    plot = cost.plot_seconds(run.columns)
    assert isinstance(plot, Stack)
    assert plot.parts["computation, and the rest of the round"].tolist() == [0.5, 0.0]


def test_a_run_records_how_long_it_stood_still_for_checkpoints(trained):
    columns = trained["fedavg"].columns
    parts = sum(columns[f"{name}_seconds"] for name in ("exchange", "evaluation", "checkpoint"))
    assert (columns["checkpoint_seconds"] > 0).all() and (parts < columns["seconds"]).all()


# --- clients ------------------------------------------------------------------------------------------------------


def test_the_distribution_has_every_client_in_ascending_order(trained):
    run = trained["fedavg"]
    (curve,) = curves(clients.plot_distribution(name_runs([run]))).curves
    accuracy = 100 * run.round(3).metrics["accuracy"]
    assert curve.points is not None and sorted(curve.points.tolist()) == list(range(7))
    assert curve.y.tolist() == sorted(accuracy.tolist()) == accuracy[curve.points].tolist()


def test_the_accuracy_by_class_is_that_of_the_test_samples_of_all_clients(trained):
    run = trained["fedavg"]
    (plot,) = clients.plot_class_accuracy(name_runs([run]))
    tested, hits = run.counts.test.sum(0), run.round(3).metrics["hits"].sum(0)
    expected = 100 * hits / np.where(tested > 0, tested, np.nan)
    assert plot.curves[0].y.tolist() == pytest.approx(expected.tolist(), nan_ok=True)
    assert plot.x_names == tuple(map(str, range(10))) and plot.table().splitlines()[1].startswith("fedavg,,0,")


def test_who_loses_against_local_is_told_for_runs_with_the_same_clients(trained):
    runs = [trained["other"], trained["local"], trained["fedavg"]]
    named_runs = name_runs(runs)
    (plot,) = clients.plot_against_local(named_runs[1:])
    gain = 100 * (trained["fedavg"].round(3).metrics["accuracy"] - trained["local"].round(3).metrics["accuracy"])
    assert isinstance(plot, Curves) and [curve.label for curve in plot.curves] == ["fedavg"] and plot.zero
    (curve,) = plot.curves
    assert curve.y.tolist() == pytest.approx(sorted(gain.tolist())), "the worst comes first"
    assert curve.points is not None and curve.points[0] == gain.argmin() and len(curve.points) == 7
    losing = int((gain < 0).sum())
    assert losing and f"fedavg: {losing} of 7 lose, client {gain.argmin()} ({gain.min():.1f})" in plot.caption
    (alone,) = clients.plot_against_local([named_runs[0], named_runs[2]])
    assert isinstance(alone, Missing) and "same data and partition" in alone.why


def test_each_run_is_compared_with_the_local_one_of_its_clients_and_seed(tmp_path):
    def ended(algorithm, seed, partition, accuracy):
        sent = "0" if algorithm == "local" else "9"
        run = written(tmp_path / f"{algorithm}{seed}{partition}", [{"up_bytes": sent}] * 2, algorithm)
        run.config.update(seed=seed, recorded={"data": "d", "partition": partition})
        vars(run)["final"] = lambda _: np.array(accuracy) / 100
        return run

    alone = [ended("local", 0, "p", [50, 60]), ended("local", 1, "q", [10, 20, 30]), ended("local", 2, "p", [0, 0])]
    fedavg = [ended("fedavg", 0, "p", [51, 62]), ended("fedavg", 1, "q", [13, 24, 35]), ended("fedavg", 2, "p", [7, 8])]
    runs = name_runs([*alone, *fedavg])
    gains = [summary.by_title(line)["gain over local"] for line in summary.summarize_runs(runs)]
    assert gains[3:] == pytest.approx([1.5, 4.0, 7.5]) and np.isnan(np.array(gains[:3], float)).all()
    plots = clients.plot_against_local(runs)
    drawn = [len(curve.y) for plot in plots if isinstance(plot, Curves) for curve in plot.curves]
    assert drawn == [2, 3, 2], "a figure for each local run"


def test_without_a_local_run_there_is_no_comparison(trained):
    (plot,) = clients.plot_against_local(name_runs([trained["fedavg"]]))
    assert isinstance(plot, Missing) and "no run among these sends nothing" in plot.why


def test_the_partition_is_that_of_the_federation(trained):
    federation = load_federation(configuration.parse(quick_run.settings()))
    plot = partition.plot_partition(trained["fedavg"])
    assert isinstance(plot, Matrices)
    train, test = plot.panels
    assert np.nan_to_num(train.values).tolist() == federation.class_counts.tolist()
    assert np.nan_to_num(test.values).tolist() == federation.test_class_counts.tolist()
    assert np.isnan(train.values).any()


def test_a_run_without_its_partition_says_so(tmp_path):
    run = written(tmp_path / "run", [])
    plot = partition.plot_partition(run)
    assert isinstance(plot, Missing) and "has no partition.csv" in plot.why


def test_the_table_of_runs_has_the_best_round_and_the_worst_client(trained, tmp_path):
    run = trained["local"]
    row = summary.by_title(summary.summarize_run(run))
    mean = 100 * run.columns["accuracy_mean"]
    assert (row["best (%)"], row["in round"], row["last (%)"]) == (mean.max(), mean.argmax() + 1, mean[-1])
    assert row["worst client (%)"] == 100 * run.round(3).metrics["accuracy"].min()
    assert (row["rounds"], row["of"]) == (3, 3)
    empty = summary.format_line(summary.summarize_run(written(tmp_path / "new", [])))
    assert [*empty.values()][:7] == ["0", "20", "", "", "", "", ""]
